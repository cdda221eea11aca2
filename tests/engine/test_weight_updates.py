"""New weights: exactly those, at once, for everything that starts later; or an error and the old ones."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax import Engine, EngineClosed, EngineStateError, RequestOutput, SamplingParams, WeightUpdateError
from tokenspeed_jax.engine.memory import bytes_in_use
from tokenspeed_jax.engine.outputs import RequestDelta

from .conftest import EngineFactory

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=True)
LONG = dataclasses.replace(GREEDY, max_tokens=150)
PROMPT = np.random.default_rng(0).integers(3, 500, 40).tolist()
SMALL = {
    "prefix_granularity": 16,
    "kernel_page_size": 16,
    "max_model_len": 256,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 4 << 20,
}


@pytest.fixture(scope="module")
def first_state(tiny_engine: EngineFactory) -> nnx.State:
    """The weights that the engine of this module started with."""
    return jax.tree.map(jnp.copy, tiny_engine("llama", **SMALL).export_weights())


@pytest.fixture
def engine(tiny_engine: EngineFactory, first_state: nnx.State) -> Engine:
    """An engine with the weights that it started with, of whatever version, and prefixes of these in its cache."""
    engine = tiny_engine("llama", **SMALL)
    engine.update_weights(first_state, version=engine.weight_version + 1)
    engine.generate(PROMPT, GREEDY)
    return engine


def changed(state: nnx.State, seed: int) -> nnx.State:
    """Other weights, in arrays of their own."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.05, x.shape), x.dtype), state)


def one(engine: Engine, prompt: list[int] = PROMPT) -> RequestOutput:
    return engine.generate(prompt, GREEDY)[0]


def drawn(output: RequestOutput) -> tuple[list[int], list[float] | None]:
    """Tokens and their log-probabilities, to the bit."""
    return output.samples[0].token_ids, output.samples[0].logprobs


def pointers(state: nnx.State) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]


def test_new_weights_give_what_a_fresh_engine_gives_whatever_was_cached(engine: Engine, first_state: nnx.State) -> None:
    before = one(engine)
    assert before.cached_tokens == 32
    new = changed(first_state, 1)
    update = engine.update_weights(new, version=engine.weight_version + 7)
    cold, warm = one(engine), one(engine)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
    model = nnx.merge(engine._assembly.programs.store.structure.graph, new)
    with Engine.from_model(model, dataclasses.replace(engine.config, model="fresh")) as fresh:
        assert drawn(cold) == drawn(one(fresh)) != drawn(before)
        assert drawn(warm) == drawn(one(fresh))
    tokens, logprobs = drawn(cold)
    assert engine.score(PROMPT + tokens)[40:] == pytest.approx(logprobs, abs=1e-5)
    assert cold.weight_version == engine.weight_version == engine.stats().weight_version == update.version
    assert cold.samples[0].weight_versions == [update.version] * 6
    assert engine.update_weights(first_state, version=update.version + 1).seconds > 0
    assert drawn(one(engine)) == drawn(before)


def test_arrays_of_the_right_kind_are_used_as_they_are(engine: Engine, first_state: nnx.State) -> None:
    new = changed(first_state, 2)
    update = engine.update_weights(new, version=engine.weight_version + 1)
    count = len(jax.tree.leaves(new))
    assert (update.bytes_moved, update.arrays_kept, update.arrays_converted) == (0, count, 0)
    assert pointers(engine.export_weights()) == pointers(new)  # type: ignore[arg-type]


def test_a_checkpoints_names_are_fused_into_the_memory_of_what_they_replace(
    engine: Engine, first_state: nnx.State
) -> None:
    expected, conversions = drawn(one(engine)), engine._assembly.programs.store._conversions
    tensors: Any = engine.export_weights("hf")
    names = {name for rule in engine._assembly.programs.store.layout.rules.values() for name in rule.tensors}
    assert set(tensors) == names
    version = engine.weight_version
    update = engine.update_weights(tensors, version=version + 1)
    fused = [path for path, _ in nnx.to_flat_state(first_state) if path[-2] in ("proj", "gate_up")]
    assert update.arrays_converted == len(fused) == 8
    for program in conversions._programs.values():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == update.bytes_moved > memory.temp_size_in_bytes
    assert drawn(one(engine)) == expected
    arrays = engine._assembly.programs.weights
    numpy = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    assert engine.update_weights(numpy, version=version + 2).arrays_kept == 0
    assert sum(array.is_deleted() for array in arrays) == len(fused)
    assert not any(tensor.is_deleted() for tensor in tensors.values())
    assert drawn(one(engine)) == expected
    # A trainer's dtype: cast as loading casts.
    halves = {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
    engine.update_weights(halves, version=version + 3)
    exported: Any = engine.export_weights("hf")
    assert all(exported[name].dtype == jnp.float32 for name in names)
    assert all((exported[name] == halves[name]).all() for name in names)


def test_fifty_updates_leave_memory_flat_and_compile_nothing(engine: Engine, first_state: nnx.State) -> None:
    device = jax.devices()[0]
    compiled: list[str] = []

    def note(event: str, _seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    tensors: Any = engine.export_weights("hf")
    used = []
    version = engine.weight_version
    params = [tensors, jax.tree.map(jnp.copy, first_state)]
    for turn in range(54):
        if turn == 4:
            counted = engine.stats().compilations_after_warmup
            jax.monitoring.register_event_duration_secs_listener(note)
        engine.update_weights(params[turn % 2], version=version + 1 + turn, mode="keep")
        used.append(bytes_in_use(device))
    assert engine.stats().compilations_after_warmup == counted
    assert not compiled
    assert len(set(used[4::2])) == len(set(used[5::2])) == 1


def without(state: nnx.State, path: tuple[Any, ...]) -> nnx.State:
    return nnx.from_flat_state([item for item in nnx.to_flat_state(state) if item[0] != path])


def replaced(state: nnx.State, path: tuple[Any, ...], value: Any) -> nnx.State:
    flat = dict(nnx.to_flat_state(state))
    return nnx.from_flat_state([(key, nnx.Param(value) if key == path else item) for key, item in flat.items()])


def deleted(array: jax.Array) -> jax.Array:
    array.delete()
    return array


NORM = ("layers", 1, "mlp_norm", "weight")
REFUSALS: dict[str, tuple[Callable[[nnx.State], Any], str]] = {
    "missing": (lambda s: without(s, NORM), "1 missing: layers.1.mlp_norm.weight"),
    "unknown": (
        lambda s: nnx.from_flat_state([*nnx.to_flat_state(s), (("more",), nnx.Param(jnp.ones(2)))]),
        "1 unknown: more",
    ),
    "shape": (lambda s: replaced(s, NORM, jnp.ones(63)), r"layers.1.mlp_norm.weight \(63,\) where \(64,\) is expected"),
    "dtype": (
        lambda s: replaced(s, NORM, jnp.ones(64, jnp.int32)),
        r"1 not floating-point: layers.1.mlp_norm.weight \(int32\)",
    ),
    "no array": (lambda s: replaced(s, NORM, "x"), r"1 no arrays: layers.1.mlp_norm.weight \(str\)"),
    "deleted": (lambda s: replaced(s, NORM, deleted(jnp.ones(64))), "1 deleted or donated: layers.1.mlp_norm.weight"),
    "nan": (lambda s: replaced(s, NORM, jnp.full(64, jnp.nan)), "not finite: layers.1.mlp_norm.weight"),
    "infinite": (lambda s: replaced(s, NORM, np.full(64, np.inf, np.float32)), "not finite: layers.1.mlp_norm.weight"),
    "checkpoint name": (lambda _: {"model.norm.weight": jnp.ones(64)}, "missing: model.embed_tokens.weight"),
    "kind": (lambda _: [1, 2], "params must be an nnx.State"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_what_does_not_fit_is_named_and_the_old_weights_stay(
    engine: Engine, first_state: nnx.State, fault: str
) -> None:
    make, message = REFUSALS[fault]
    expected, version, arrays = drawn(one(engine)), engine.weight_version, engine._assembly.programs.weights
    with pytest.raises(WeightUpdateError, match=message) as error:
        engine.update_weights(make(first_state), version=version + 1, check_finite=True)
    if fault not in ("unknown", "checkpoint name", "kind"):
        assert error.value.parameter == "layers.1.mlp_norm.weight"
    assert engine.weight_version == version
    assert engine._assembly.programs.weights is arrays
    warm = one(engine)
    assert (drawn(warm), warm.cached_tokens) == (expected, 32)


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "2", 2**63, None])
def test_versions_grow(engine: Engine, first_state: nnx.State, version: Any) -> None:
    before = engine.weight_version
    with pytest.raises(WeightUpdateError, match="version must be"):
        engine.update_weights(first_state, version=before if version is None else version)
    assert engine.weight_version == before


@pytest.mark.parametrize("call", ["update", "export"])
def test_unknown_modes_and_namings_are_refused(engine: Engine, first_state: nnx.State, call: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "update": lambda: engine.update_weights(first_state, version=10**6, mode="wait"),  # type: ignore[arg-type]
        "export": lambda: engine.export_weights("wait"),  # type: ignore[arg-type]
    }
    with pytest.raises(ValueError, match=r"must be .* got 'wait'"):
        calls[call]()


class Watched:
    """A request that another thread follows; slow until it is waited for, so that there is time to act meanwhile."""

    def __init__(self, engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> None:
        self.deltas: list[RequestDelta] = []
        self.pace = 0.01
        self.started, self.ended = threading.Event(), threading.Event()
        self.request_id = engine.submit(prompt, params, on_delta=self._note)

    def _note(self, delta: RequestDelta) -> None:
        self.deltas.append(delta)
        if len(self.deltas) >= 3:
            self.started.set()
        time.sleep(self.pace)
        if delta.finish_reason is not None:
            self.ended.set()

    def wait(self) -> list[int]:
        """The version of each token, once all have come."""
        self.pace = 0.0
        assert self.ended.wait(60)
        return [delta.weight_version for delta in self.deltas for _ in delta.token_ids]


def test_a_request_that_is_kept_says_which_weights_drew_each_token(engine: Engine, first_state: nnx.State) -> None:
    old = engine.weight_version
    running = Watched(engine, LONG)
    queued = Watched(engine, GREEDY)  # there is place for one: it has not begun
    assert running.started.wait(60)
    new = changed(first_state, 3)
    engine.update_weights(new, version=old + 1, mode="keep")
    later = Watched(engine, GREEDY)
    versions = running.wait()
    assert len(versions) == 150
    assert versions == sorted(versions)
    assert set(versions) == {old, old + 1}
    # What the kept request computed, before and after, is no prefix of what begins later; nor are old prefixes.
    assert queued.wait() == later.wait() == [old + 1] * 6
    assert queued.deltas[0].cached_tokens == 0
    fresh = Watched(engine, GREEDY, PROMPT)
    assert fresh.wait() == [old + 1] * 6
    engine.update_weights(jax.tree.map(jnp.copy, new), version=old + 2)
    expected = drawn(one(engine))[0]
    for watched in (queued, later, fresh):
        assert [token for delta in watched.deltas for token in delta.token_ids] == expected


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_what_runs_ends_before_the_weights_change(engine: Engine, first_state: nnx.State, mode: Any) -> None:
    old = engine.weight_version
    running = Watched(engine, LONG)
    assert running.started.wait(60)
    with ThreadPoolExecutor() as pool:
        update = pool.submit(engine.update_weights, changed(first_state, 4), version=old + 1, mode=mode)
        versions = running.wait()
        update.result(60)
    assert set(versions) == {old}
    assert running.deltas[-1].finish_reason == ("length" if mode == "drain" else "abort")
    assert (len(versions) == 150) == (mode == "drain")
    assert one(engine).cached_tokens == 0


def test_what_is_submitted_while_an_update_waits_gets_the_new_weights(engine: Engine, first_state: nnx.State) -> None:
    old = engine.weight_version
    running = Watched(engine, LONG)
    assert running.started.wait(60)
    with ThreadPoolExecutor() as pool:
        update = pool.submit(engine.update_weights, changed(first_state, 5), version=old + 1)
        while engine._loop._change is None:
            pass
        given_up, held = Watched(engine, GREEDY), Watched(engine, GREEDY)
        engine.abort(given_up.request_id)
        assert given_up.wait() == []
        running.pace = 0.0
        assert held.wait() == [old + 1] * 6
        update.result(60)
    assert set(running.wait()) == {old}
    assert engine.num_queued_requests == 0


@pytest.fixture
def shared(engine: Engine, first_state: nnx.State) -> Iterator[list[jax.Array]]:
    """Arrays that the engine has from a trainer; afterwards it has others."""
    new = changed(first_state, 6)
    engine.update_weights(new, version=engine.weight_version + 1)
    yield jax.tree.leaves(new)
    engine.update_weights(first_state, version=engine.weight_version + 1)
    assert drawn(one(engine)) == drawn(one(engine))


def test_deleted_weights_are_an_error_until_there_are_others(
    engine: Engine, shared: list[jax.Array], first_state: nnx.State
) -> None:
    shared[-1].delete()
    name = engine._assembly.programs.store.layout.parameters[-1].name
    for call in (lambda: one(engine), lambda: engine.score(PROMPT), engine.export_weights, engine.resume):
        with pytest.raises(EngineStateError, match=f"parameter {name}.*was deleted or donated"):
            call()
    assert engine.is_healthy
    engine.update_weights(changed(first_state, 7), version=engine.weight_version + 1)
    assert len(drawn(one(engine))[0]) == 6


@pytest.mark.parametrize("moment", ["plan", "dispatch"])
def test_weights_that_are_deleted_under_a_request_end_it_and_not_the_engine(
    engine: Engine, shared: list[jax.Array], first_state: nnx.State, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    builder, build = engine._loop._builder, engine._loop._builder.build
    steps: list[int] = []

    def delete_in_the_fifth_step(*arguments: Any) -> Any:
        built = build(*arguments)
        steps.append(1)
        if len(steps) == 5:
            if moment == "dispatch":
                shared[2].delete()
            else:
                engine._loop.call(shared[2].delete)
        return built

    monkeypatch.setattr(builder, "build", delete_in_the_fifth_step)
    with pytest.raises(EngineStateError, match="was deleted or donated"):
        engine.generate([PROMPT, PROMPT[:20]], LONG)
    assert engine.is_healthy
    monkeypatch.undo()
    expected_of = changed(first_state, 8)
    engine.update_weights(expected_of, version=engine.weight_version + 1)
    healed = [drawn(one(engine, prompt)) for prompt in (PROMPT, PROMPT[:20])]
    engine.update_weights(jax.tree.map(jnp.copy, expected_of), version=engine.weight_version + 1)
    assert engine.flush_cache()
    assert healed == [drawn(one(engine, prompt)) for prompt in (PROMPT, PROMPT[:20])]
    assert engine._assembly.programs.model.arena.null_parent_is_zero()


def test_a_receiver_of_deltas_cannot_wait_for_an_update(engine: Engine, first_state: nnx.State) -> None:
    errors: list[str] = []
    done = threading.Event()

    def watch(delta: RequestDelta) -> None:
        try:
            engine.update_weights(first_state, version=10**9)
        except RuntimeError as error:
            errors.append(str(error))
        if delta.finish_reason is not None:
            done.set()

    engine.submit(PROMPT, GREEDY, on_delta=watch)
    assert done.wait(60)
    assert len(errors) == 6


def test_a_closed_engine_takes_no_weights(tiny_engine: EngineFactory, first_state: nnx.State) -> None:
    engine = tiny_engine("llama", **SMALL)
    with Engine(dataclasses.replace(engine.config, seed=1)) as other:
        pass
    for call in (
        lambda: other.update_weights(first_state, version=1),
        other.export_weights,
        other.pause,
        other.resume,
        other.sleep,
        other.wake,
    ):
        with pytest.raises(EngineClosed):
            call()
