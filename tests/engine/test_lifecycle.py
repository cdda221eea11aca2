"""Pause, sleep and wake: every call in every state does what the table in docs/rollouts.md says, or is refused."""

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tokenspeed_jax import Engine, EngineStateError
from tokenspeed_jax.engine.outputs import RequestDelta

from .conftest import EngineFactory
from .test_weight_updates import GREEDY, LONG, PROMPT, SMALL, Watched, drawn, one

DOCUMENT = Path(__file__).parents[2] / "docs" / "rollouts.md"


def documented() -> dict[tuple[str, str], str]:
    """(call, state) -> what the table says."""
    text = DOCUMENT.read_text(encoding="utf-8")
    header, _, *rows = text[text.index("| call |") :].split("\n\n")[0].splitlines()
    states = [cell.strip() for cell in header.strip("|").split("|")][1:]
    table = {}
    for row in rows:
        call, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        table |= {(call, state): cell for state, cell in zip(states, cells, strict=True)}
    return table


@pytest.fixture(scope="module")
def awake(tiny_engine: EngineFactory) -> Engine:
    engine = tiny_engine("llama", **SMALL)
    one(engine)
    return engine


@pytest.fixture(scope="module")
def params(awake: Engine) -> nnx.State:
    return jax.tree.map(jnp.copy, awake.export_weights())


@pytest.fixture(scope="module")
def expected(awake: Engine) -> tuple[list[int], list[float] | None]:
    return drawn(one(awake))


@pytest.fixture
def engine(awake: Engine, params: nnx.State) -> Iterator[Engine]:
    """An engine that runs, with nothing to do; afterwards it does again."""
    yield awake
    if awake.is_sleeping:
        awake.wake()
    awake.pause("abort")
    awake.update_weights(params, version=awake.weight_version + 1)
    awake.resume()


def enter(engine: Engine, state: str) -> None:
    match state:
        case "running":
            pass
        case "paused":
            engine.pause()
        case "paused with requests":
            watched = Watched(engine, LONG)
            assert watched.started.wait(60)
            engine.pause("keep")
            assert watched.deltas[-1].finish_reason is None
        case "asleep, level 1":
            engine.sleep()
        case "asleep, level 2":
            engine.sleep(2)
        case "no weights":
            engine.sleep(2)
            engine.wake()
        case _:
            raise AssertionError(state)


def submit(engine: Engine) -> str:
    watched = Watched(engine, GREEDY, PROMPT[:20])
    if not engine.is_paused:
        watched.wait()
        return "yes"
    assert not watched.started.wait(0.05)
    engine.resume()
    watched.wait()
    return "waits"


def update(engine: Engine, params: nnx.State, mode: Any) -> None:
    version = engine.weight_version + 1
    engine.update_weights(params, version=version, mode=mode)
    assert engine.weight_version == version


def pause(engine: Engine, mode: Any) -> None:
    engine.pause(mode)
    assert engine.is_paused
    assert (engine.stats().running > 0) <= (mode == "keep")


def wake(engine: Engine) -> None:
    engine.wake()
    arena = engine._assembly.programs.model.arena
    assert arena.null_parent_is_zero()
    assert not engine.is_sleeping


CALLS: dict[str, Callable[[Engine, nnx.State], object]] = {
    "`generate`, `stream`, `submit`": lambda engine, _: submit(engine),
    "`score`": lambda engine, _: engine.score(PROMPT),
    '`update_weights`, `"drain"`': lambda engine, params: update(engine, params, "drain"),
    '`update_weights`, `"abort"`': lambda engine, params: update(engine, params, "abort"),
    '`update_weights`, `"keep"`': lambda engine, params: update(engine, params, "keep"),
    "`export_weights`": lambda engine, _: engine.export_weights(),
    '`pause`, `"keep"`': lambda engine, _: pause(engine, "keep"),
    '`pause`, `"drain"`': lambda engine, _: pause(engine, "drain"),
    '`pause`, `"abort"`': lambda engine, _: pause(engine, "abort"),
    "`resume`": lambda engine, _: engine.resume(),
    "`sleep(1)`": lambda engine, _: engine.sleep(1),
    "`sleep(2)`": lambda engine, _: engine.sleep(2),
    "`wake`": lambda engine, _: wake(engine),
    "`flush_cache`": lambda engine, _: "yes" if engine.flush_cache() else "no",
    "`abort`": lambda engine, _: engine.abort("nobody"),
}
TABLE = documented()


def test_the_table_is_of_all_calls() -> None:
    assert {call for call, _ in TABLE} == {*CALLS, "`close`"}
    assert len(TABLE) == 16 * 6


@pytest.mark.parametrize(("call", "state"), [cell for cell in TABLE if cell[0] != "`close`"])
def test_a_cell_of_the_table(
    engine: Engine, params: nnx.State, expected: tuple[list[int], list[float]], call: str, state: str
) -> None:
    enter(engine, state)
    before = (engine.is_paused, engine.is_sleeping, engine.weight_version)
    try:
        outcome = CALLS[call](engine, params)
        outcome = outcome if outcome in ("waits", "no") else "yes"
    except EngineStateError:
        outcome = "refused"
        assert (engine.is_paused, engine.is_sleeping, engine.weight_version) == before
    assert outcome == TABLE[call, state]
    # Whatever that was, the way back is short, and the engine is what it was.
    if engine.is_sleeping:
        engine.wake()
    engine.pause("abort")
    engine.update_weights(params, version=engine.weight_version + 1)
    engine.resume()
    assert drawn(one(engine)) == expected


@pytest.mark.parametrize("state", sorted({state for _, state in TABLE}))
def test_an_engine_can_be_closed_in_every_state(awake: Engine, state: str) -> None:
    assert TABLE["`close`", state] == "yes"
    model = awake._assembly.programs.model.structure.module(awake._assembly.programs.weights)
    engine = Engine.from_model(model, dataclasses.replace(awake.config, model="mine"))
    ends = []

    def note(delta: RequestDelta) -> None:
        ends.append(delta.finish_reason)

    if state == "paused with requests":
        engine.pause()
        engine.submit(PROMPT, GREEDY, on_delta=note)
    else:
        enter(engine, state)
    engine.close()
    assert ends == ["abort"] * (state == "paused with requests")
    # A level-2 sleep, and the end of the engine, leave the trainer's arrays alone.
    assert not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(model)))


def test_sleep_frees_what_it_says(engine: Engine, params: nnx.State) -> None:
    report = engine.memory_report
    update(engine, params, "drain")
    update(engine, jax.tree.map(lambda x: x.astype(jnp.bfloat16), engine.export_weights()), "drain")  # now its own
    assert engine.stats().arena_bytes == report.arena
    gc.collect()
    light = engine.sleep()
    assert light.freed_bytes == report.arena
    assert engine.stats().arena_bytes == 0
    deep = engine.sleep(2)
    assert (deep.level, deep.freed_bytes) == (2, report.weights)
    woken = engine.wake()
    assert woken.bytes_after - woken.bytes_before == report.arena
    assert woken.bytes_before == deep.bytes_after
    assert woken.seconds > 0


def test_sleeping_and_waking_compiles_nothing(engine: Engine, params: nnx.State) -> None:
    compiled: list[str] = []
    is_counting = True

    def note(event: str, _seconds: float, **_: object) -> None:
        if is_counting and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    for level in (1, 2, 1):
        engine.sleep(level)  # type: ignore[arg-type]
        engine.wake()
        update(engine, params, "drain")
        one(engine)
    is_counting = False
    assert not compiled


@pytest.mark.parametrize("level", [0, 3, True, "1"])
def test_other_levels_are_refused(engine: Engine, level: Any) -> None:
    with pytest.raises(ValueError, match="level must be 1 or 2"):
        engine.sleep(level)
    assert not engine.is_sleeping


def test_a_running_request_keeps_the_engine_awake(engine: Engine) -> None:
    watched = Watched(engine, LONG)
    assert watched.started.wait(60)
    with pytest.raises(EngineStateError, match="1 requests run or wait"):
        engine.sleep()
    assert len(watched.wait()) == 150


def test_a_paused_request_goes_on_as_if_nothing_had_been(engine: Engine) -> None:
    def tokens(watched: Watched) -> list[int]:
        watched.wait()
        return [token for delta in watched.deltas for token in delta.token_ids]

    alone = tokens(Watched(engine, LONG))
    watched = Watched(engine, LONG)
    for _ in range(3):
        watched.started.clear()
        assert watched.started.wait(60)
        engine.pause()
        assert not watched.ended.is_set()
        seen = len(watched.deltas)
        assert not watched.ended.wait(0.02)
        assert len(watched.deltas) == seen
        engine.resume()
    assert tokens(watched) == alone


def test_what_was_submitted_to_a_paused_engine_waits_through_its_sleep(
    engine: Engine, params: nnx.State, expected: tuple[list[int], list[float]]
) -> None:
    engine.pause()
    held = Watched(engine, GREEDY)
    engine.sleep(2)
    with pytest.raises(EngineStateError, match="asleep"):
        engine.submit(PROMPT, GREEDY, on_delta=lambda _: None)
    engine.wake()
    with pytest.raises(EngineStateError, match="no weights"):
        engine.resume()
    update(engine, params, "drain")
    assert engine.num_queued_requests == 1
    assert not held.started.is_set()
    engine.resume()
    assert held.wait() == [engine.weight_version] * 6
    assert [token for delta in held.deltas for token in delta.token_ids] == expected[0]


def test_calls_that_wait_for_requests_take_turns(engine: Engine, params: nnx.State) -> None:
    watched = Watched(engine, dataclasses.replace(LONG, max_tokens=60))
    assert watched.started.wait(60)
    version = engine.weight_version
    threads = [
        threading.Thread(target=engine.pause, args=("drain",)),
        threading.Thread(target=update, args=(engine, params, "drain")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(watched.wait()) == 60
    assert (engine.is_paused, engine.weight_version) == (True, version + 1)
