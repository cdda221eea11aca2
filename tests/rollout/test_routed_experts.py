"""The experts that a sample's tokens went to: all of them, those of a plain forward, and given back to one."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_jax import ConfigError, Engine, EngineConfig, InvalidRequest, RequestOutput, SamplingParams
from tokenspeed_jax.engine.expert_record import ExpertRecord
from tokenspeed_jax.models.experts import expert_layer_ids
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.rollout import token_log_probabilities
from tokenspeed_jax.weights import open_checkpoint

TINY = Path(__file__).parents[1] / "golden" / "tiny"
LENGTH = 144
ASKED = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True, logprobs=True, return_routed_experts=True)
CONFIG = EngineConfig(
    model="trained",
    max_model_len=LENGTH,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefix_granularity=16,
    kernel_page_size=16,
    # 26 blocks of 16 tokens, keys and values in three layers, and one: four requests of full length need 36.
    kv_cache_memory_bytes=27 * 16 * 3 * 2 * 2 * 16 * 4,
    enable_return_routed_experts=True,
    # A sample whose step is in flight is never retracted.
    overlap_schedule=False,
    warmup=False,
    disable_progress_bars=True,
)


@pytest.fixture(scope="module")
def model() -> nnx.Module:
    """Experts, none, experts; random weights that are large enough to matter."""
    resolved, config = resolve_model(open_checkpoint(str(TINY / "qwen3_moe")).hf_config)
    changes = {"num_layers": 3, "windows": (None,) * 3, "ropes": config.ropes[:3], "sparse": (True, False, True)}
    graph, state = nnx.split(
        resolved.build(dataclasses.replace(config, **changes), dtype=jnp.float32, rngs=nnx.Rngs(1))
    )
    return nnx.merge(graph, jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, state))


@pytest.fixture(scope="module")
def engine(model: nnx.Module) -> Iterator[Engine]:
    with Engine.from_model(model, CONFIG) as engine:
        yield engine


class NotingStep(PlainStep):
    """A plain step that notes what the routers choose."""

    def routed(self, expert_ids, layer_id):
        object.__setattr__(self, "noted", getattr(self, "noted", {}) | {layer_id: expert_ids})
        return super().routed(expert_ids, layer_id)


@nnx.jit
def plain(model, tokens, expert_ids):
    """What a plain forward chooses for one padded sequence; its log-probabilities; those with given experts."""
    positions = jnp.arange(LENGTH)
    step = NotingStep(jnp.zeros(LENGTH, int), positions)
    model(tokens, positions, step)
    chosen = jnp.stack([step.noted[layer] for layer in sorted(step.noted)], axis=1)
    own = token_log_probabilities(model, tokens[None])[0]
    return chosen, own, token_log_probabilities(model, tokens[None], expert_ids=expert_ids[None])[0]


def padded(values, fill: int) -> np.ndarray:
    values = np.asarray(values, np.int32)
    return np.concatenate([values, np.full((LENGTH - len(values), *values.shape[1:]), fill, np.int32)])


def assert_replays(model, output: RequestOutput) -> None:
    """Of every sample all tokens but the newest have the experts that a plain forward chooses for them."""
    for sample in output.samples:
        tokens = [*output.prompt_token_ids, *sample.token_ids]
        told = sample.routed_experts
        assert told is not None
        assert (told.dtype, told.shape) == (np.int32, (len(tokens) - 1, 2, 2))
        chosen, own, replayed = plain(model, padded(tokens, 0), padded(told, -1))
        np.testing.assert_array_equal(told, chosen[: len(told)])
        np.testing.assert_array_equal(replayed, own)
        prompt = len(output.prompt_token_ids)
        np.testing.assert_allclose(replayed[prompt : len(tokens)], sample.logprobs, atol=1e-4)


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def test_chunked_prompts_and_samples_beside_others_have_all_of_their_tokens(engine: Engine, model: nnx.Module) -> None:
    assert engine.moe_layers == (0, 2)
    plainly = dataclasses.replace(ASKED, return_routed_experts=False)
    prompts = [ids(length, length) for length in (1, 65, 100)]
    engine.generate(prompts, plainly)
    # Whatever is cached by now is not taken; the samples of a prompt share what the first has computed.
    outputs = engine.generate([*prompts, ids(9, 40)], [ASKED, ASKED, dataclasses.replace(ASKED, n=3), plainly])
    for output in outputs[:3]:
        assert output.cached_tokens == 0
        assert_replays(model, output)
    assert outputs[3].samples[0].routed_experts is None
    assert len({tuple(sample.token_ids) for sample in outputs[2].samples}) == 3
    # What they have computed is there for those who may read it.
    assert engine.generate(prompts[2], plainly)[0].cached_tokens == 96


def test_retracted_samples_have_all_of_their_tokens(engine: Engine, model: nnx.Module) -> None:
    before = engine.stats().retractions
    whole = dataclasses.replace(ASKED, max_tokens=None)
    for output in engine.generate([ids(seed, length) for seed, length in enumerate((70, 75, 80, 85))], whole):
        assert_replays(model, output)
    assert engine.stats().retractions > before


def test_an_aborted_sample_has_what_was_computed(engine: Engine, model: nnx.Module) -> None:
    async def deltas_until_abort():
        deltas = []
        async for delta in engine.stream(ids(5, 70), dataclasses.replace(ASKED, max_tokens=60)):
            deltas.append(delta)
            if len(deltas) == 3:
                engine.abort(delta.request_id)
        return deltas

    deltas = asyncio.run(deltas_until_abort())
    assert deltas[-1].finish_reason == "abort"
    assert all(delta.routed_experts is None for delta in deltas[:-1])
    tokens = [*deltas[0].prompt_token_ids, *(token for delta in deltas for token in delta.token_ids)]
    told = deltas[-1].routed_experts
    assert told is not None
    assert len(told) == len(tokens) - 1
    chosen, _, _ = plain(model, padded(tokens, 0), padded(told, -1))
    np.testing.assert_array_equal(told, chosen[: len(told)])


def test_a_prompt_alone_has_all_of_its_tokens(engine: Engine) -> None:
    params = dataclasses.replace(ASKED, max_tokens=0, prompt_logprobs=0)
    told = engine.generate(ids(6, 30), params)[0].samples[0].routed_experts
    assert told is not None
    assert told.shape == (30, 2, 2)


def test_given_experts_are_taken_and_trained(model: nnx.Module) -> None:
    tokens = np.array(ids(7, 30))
    chosen, own, _ = plain(model, padded(tokens, 0), padded(np.full((30, 2, 2), -1), -1))
    others = np.asarray((chosen[:30] + 1) % 8)
    # A token with negative ids is routed: before the first one that is not, nothing changes.
    partly = np.where(np.arange(30)[:, None, None] < 10, -1, others)
    _, _, replayed = plain(model, padded(tokens, 0), padded(partly, -1))
    np.testing.assert_array_equal(replayed[:11], own[:11])
    assert (np.abs(replayed - own)[11:30] > 1e-4).all()

    @nnx.jit
    def experts_gradient(model, expert_ids):
        def loss(model):
            return token_log_probabilities(model, tokens[None], expert_ids=expert_ids, remat=True).sum()

        return nnx.grad(loss)(model)["layers"][2]["mlp"]["experts"]["down"][...]

    # The first expert alone is taken by everyone, with another one of no consequence.
    gradient = experts_gradient(model, jnp.broadcast_to(jnp.array([3, 5]), (1, 30, 2, 2)))
    assert [bool(expert.any()) for expert in gradient] == [expert in (3, 5) for expert in range(8)]


FAMILIES = ("qwen3_moe", "minimax_m2", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_moe", "kimi_linear", "minimax")
BEHIND_A_DENSE_LAYER = ("qwen3_moe", "deepseek_v3", "kimi_linear")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_with_experts_asks_the_step(family: str) -> None:
    """Traced, not run."""
    resolved, config = resolve_model(open_checkpoint(str(TINY / family)).hf_config)
    model = nnx.eval_shape(lambda: resolved.build(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    layers = expert_layer_ids(model)
    assert layers == tuple(range(config.num_layers))[family in BEHIND_A_DENSE_LAYER :]
    graph, state = nnx.split(model)
    noted: dict[int, tuple[int, ...]] = {}

    def forward(state):
        positions = jnp.arange(4)
        step = NotingStep(jnp.zeros(4, int), positions, num_segments=1)
        hidden = nnx.merge(graph, state)(positions, positions, step)
        noted.update((layer, ids.shape) for layer, ids in step.noted.items())
        return hidden

    jax.eval_shape(forward, state)
    assert noted == dict.fromkeys(layers, (4, 2))


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("llama", (1, 4, 2, 2), "the model has no experts"),
        ("qwen3_moe", (1, 4, 4, 2), r"expert_ids must be \(1, 4, 3\) and top_k"),
        ("qwen3_moe", (1, 5, 3, 2), r"expert_ids must be \(1, 4, 3\) and top_k"),
        ("qwen3_moe", (4, 3, 2), r"expert_ids must be \(1, 4, 3\) and top_k"),
    ],
)
def test_experts_that_do_not_fit_are_refused(family: str, shape: tuple[int, ...], message: str) -> None:
    resolved, config = resolve_model(open_checkpoint(str(TINY / family)).hf_config)
    model = nnx.eval_shape(lambda: resolved.build(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        token_log_probabilities(model, jnp.zeros((1, 4), int), expert_ids=jnp.zeros(shape, int))


def test_who_cannot_have_them_is_told(model: nnx.Module) -> None:
    with Engine.from_model(model, dataclasses.replace(CONFIG, enable_return_routed_experts=False)) as engine:
        with pytest.raises(InvalidRequest, match="enable_return_routed_experts") as error:
            engine.generate(ids(1, 4), ASKED)
        assert error.value.parameter == "return_routed_experts"
        programs = engine._assembly.programs
        assert not programs.model.returns_expert_ids
    with pytest.raises(ConfigError, match=r"no layer of .*llama has experts"):
        Engine(dataclasses.replace(CONFIG, model=str(TINY / "llama")))
    with pytest.raises(InvalidRequest, match="return_routed_experts must be true or false"):
        SamplingParams(return_routed_experts=1)  # type: ignore[arg-type]


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), max_size=8))
def test_a_record_keeps_what_came_last_of_every_token(shared: int, jumps: list[tuple[int, int]]) -> None:
    prompt, record = ExpertRecord(None), ExpertRecord(None)
    everything = np.arange(2000, dtype=np.int16).reshape(-1, 2, 1)
    if shared:
        prompt.put(0, everything[:shared])
        record = ExpertRecord(prompt)
    assert record.whole() is None
    expected = everything[:shared].astype(np.int32)
    for number, (back, count) in enumerate(jumps, 1):
        # Never behind a gap: a sample begins where its prompt's record ends, or before, and feeds all of the prompt.
        first = max(len(expected) - back, 0)
        count = max(count, len(expected) - first) if number == 1 else count
        rows = everything[:count] + np.int16(number)
        record.put(first, rows)
        grown = np.zeros((max(len(expected), first + count), 2, 1), np.int32)
        grown[: len(expected)] = expected
        grown[first : first + count] = rows
        expected = grown
    if jumps:
        np.testing.assert_array_equal(record.whole(), expected)
