"""A process with eight devices: a trainer's (fsdp, tensor) sharded parameters feed an engine on the first of them.

Run by test_sharded_trainer.py, which sets XLA_FLAGS.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src.array import ArrayImpl

from tokenspeed_jax import Engine, EngineConfig, SamplingParams
from tokenspeed_jax.models.llama import Llama
from tokenspeed_jax.rollout import token_log_probabilities
from tokenspeed_jax.weights import model_of, open_config

TINY = Path(__file__).parents[1] / "golden" / "tiny"
PROMPT = np.random.default_rng(0).integers(3, 500, 12).tolist()
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=True)
MESH = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharded(array: jax.Array) -> jax.Array:
    """Matrices over both axes, vectors on every device."""
    return jax.device_put(array, jax.NamedSharding(MESH, jax.P("fsdp", "tensor") if array.ndim == 2 else jax.P()))


def drawn(engine: Engine) -> tuple[list[int], list[float]]:
    sample = engine.generate(PROMPT, GREEDY)[0].samples[0]
    assert sample.logprobs is not None
    return sample.token_ids, sample.logprobs


class HostTrip(Exception):
    """An array that several devices have was read by the host."""


def without_host_trips(update: Any) -> Any:
    """Runs an update; on a CPU, JAX's guards of transfers see none, whatever happens."""
    read = ArrayImpl._value  # pyright: ignore[reportAttributeAccessIssue]

    def refuse(array: Any) -> Any:
        if len(array.sharding.device_set) > 1:
            raise HostTrip
        return read.fget(array)

    ArrayImpl._value = property(refuse)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return update()
    finally:
        ArrayImpl._value = read  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    assert len(jax.devices()) == 8
    config = model_of(open_config(str(TINY / "llama")))[1]
    config = dataclasses.replace(config, num_layers=1, windows=(None,), ropes=config.ropes[:1])
    model = Llama(config, dtype="float32", rngs=nnx.Rngs(0))
    graph, first = nnx.split(model)
    options = EngineConfig(
        model="trained",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 20,
        warmup=False,
        disable_progress_bars=True,
    )
    step = jax.jit(lambda state: jax.tree.map(lambda x: 5 * x if x.ndim == 2 else x, state))
    forward = jax.jit(lambda state, tokens: token_log_probabilities(nnx.merge(graph, state), tokens))
    trained = step(jax.tree.map(sharded, first))
    embedding = trained["embed"]["weight"][...]
    assert embedding.sharding.spec == jax.P("fsdp", "tensor")
    try:
        without_host_trips(lambda: np.asarray(embedding))
    except HostTrip:
        pass
    else:
        raise AssertionError("the host read a sharded array, and nobody noticed")

    with Engine.from_model(model, options) as engine:
        before = drawn(engine)
        update = without_host_trips(lambda: engine.update_weights(trained, version=1))
        of_mesh = drawn(engine)
        # What every device has whole is used as it is.
        assert update.arrays_kept == sum(leaf.ndim == 1 for leaf in jax.tree.leaves(first)) > 0
        arrays = jax.tree.leaves(engine.export_weights())
        assert all(array.sharding.device_set == {jax.devices()[0]} for array in arrays)
        tokens = np.array([PROMPT + of_mesh[0]])
        np.testing.assert_allclose(of_mesh[1], forward(trained, tokens)[0, len(PROMPT) :], atol=1e-5)

        alone: Any = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), trained)
        engine.update_weights(alone, version=2)
        assert of_mesh == drawn(engine) != before
        # Under a checkpoint's names, fused on the engine's device.
        tensors: Any = jax.tree.map(sharded, engine.export_weights("hf"))
        without_host_trips(lambda: engine.update_weights(tensors, version=3))
        compilations = engine.stats().compilations_after_warmup
        without_host_trips(lambda: engine.update_weights(tensors, version=4))
        assert engine.stats().compilations_after_warmup == compilations
        assert drawn(engine) == of_mesh


if __name__ == "__main__":
    main()
