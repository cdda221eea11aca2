"""Whatever fails in the step loop, every request is told, none waits for ever, and none is told that it was aborted."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tokenspeed_jax import Engine, EngineClosed, EngineConfig, RequestDelta, SamplingParams
from tokenspeed_jax.engine import landing
from tokenspeed_jax.engine.stop import StopChecker

from .conftest import GOLDEN

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, n=2)
SHORT = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

Inject = Callable[[Engine, pytest.MonkeyPatch], None]


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        model=str(GOLDEN / "tiny" / "llama"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=16 << 20,
        warmup=False,
        disable_progress_bars=True,
    )
    with Engine(config) as engine:
        yield engine


def failing(*_args: object, **_kwargs: object) -> None:
    raise MemoryError("injected")


def in_dispatch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._assembly.programs, "run", failing)


def in_landing(_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of samples have been found then, but nobody has been told of them."""
    monkeypatch.setattr(landing.RowResults, "apply", failing)


def in_decoding(_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopChecker, "push", failing)
    monkeypatch.setattr(StopChecker, "flush", failing)


def in_command(engine: Engine, _monkeypatch: pytest.MonkeyPatch) -> None:
    engine._loop.call(failing)


@pytest.mark.parametrize("inject", [in_dispatch, in_landing, in_decoding, in_command])
def test_every_request_ends_with_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch, inject: Inject) -> None:
    ends: list[tuple[str, str | None]] = []

    def note(delta: RequestDelta) -> None:
        if delta.finish_reason is not None:
            ends.append((delta.request_id, delta.finish_reason))

    def submit_all() -> None:
        # On the loop's thread, so that the fault meets all of them, some still in the inbox.
        engine.submit(PROMPT, LONG, request_id="first", on_delta=note)
        inject(engine, monkeypatch)
        engine.submit(PROMPT, SHORT, request_id="second", on_delta=note)
        engine.submit(PROMPT, SHORT, request_id="third", on_delta=note)

    engine._loop.call(submit_all)
    engine._loop._thread.join(60)
    assert sorted(ends) == [("first", "error"), ("first", "error"), ("second", "error"), ("third", "error")]
    assert isinstance(engine._loop.failure, MemoryError)
    assert engine.stats().finished == {"error": 4}
    assert not engine.is_healthy
    assert engine.num_queued_requests == 0
    with pytest.raises(EngineClosed) as caught:
        engine.submit(PROMPT, SHORT, on_delta=note)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_stream_raises_the_cause(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream() -> None:
        async for _ in engine.stream(PROMPT, LONG):
            in_dispatch(engine, monkeypatch)

    with pytest.raises(EngineClosed) as caught:
        asyncio.run(stream())
    assert isinstance(caught.value.__cause__, MemoryError)
