"""The compiled step: `(weights, planes, device_state, batch) -> (planes, device_state, outputs)`.

Planes and device state are donated, so a step updates the arena in place. The sampled token of each slot stays in
the device state: the next step takes its input from there, and the host may plan that step before this one landed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int16

from tokenspeed_jax.attention.paged import PagedStep
from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.cache.resident_tables import Tables, apply_changes, empty_tables
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.cache.write_locations import decode_window, extend_span
from tokenspeed_jax.engine.batch import FROM_DEVICE, BatchLayout
from tokenspeed_jax.engine.sampler import SampleResult, sample, sample_greedy
from tokenspeed_jax.engine.sampling_state import SamplingState, init_sampling_state
from tokenspeed_jax.engine.split_model import ModelStructure, Weights
from tokenspeed_jax.pallas_kernels.implementations import Implementation

Planes = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceState:
    """What steps carry from one to the next beside the arena; donated.

    Attributes:
        last_tokens: newest sampled token of each request slot; slot 0 is padding.
        sampling: token counts, bias and stop masks of the slots.
        tables: block tables of the slots, per history group.
    """

    last_tokens: Int[Array, " slots"]
    sampling: SamplingState
    tables: Tables


def init_device_state(max_num_seqs: int, vocab_size: int, router: CacheGroupRouter) -> DeviceState:
    """The state before the first request; created on the device."""
    return DeviceState(
        last_tokens=jnp.zeros(max_num_seqs + 1, jnp.int32),
        sampling=init_sampling_state(max_num_seqs, vocab_size),
        tables=empty_tables(router, max_num_seqs),
    )


@dataclasses.dataclass(frozen=True)
class StepModel:
    """A model split for compiled steps, with where its layers' caches are.

    Attributes:
        structure: what makes a module of the weights, which are a step argument.
        precision: matmul precision of every product in the step; None leaves JAX's default.
        returns_logits: whether steps that run the whole sampler hand out their logits, from which `redraw` draws.
        returns_expert_ids: whether steps hand out the experts of their tokens.
    """

    structure: ModelStructure
    arena: CacheArena
    router: CacheGroupRouter
    bindings: tuple[LayerBinding, ...]
    attention_implementation: Implementation | None
    precision: str | None
    returns_logits: bool = False
    returns_expert_ids: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceOutputs:
    """What a step hands out beside the arena and the state, while it is on the device.

    Attributes:
        packed: what was drawn for each row, see `unpack_outputs`.
        logits: of each row, from which `redraw` draws; None where steps of this kind do not hand them out.
        hidden: what the model made of every token, which `PromptScorer` scores; None in decode mode, which feeds no
            prompts.
        expert_ids: of every token, in the layers that have experts; None where the engine does not return them.
    """

    packed: Int[Array, "rows columns"]
    logits: Float[Array, "rows vocab"] | None = None
    hidden: Float[Array, "tokens hidden"] | None = None
    expert_ids: Int16[Array, "tokens moe_layers top_k"] | None = None


StepResult = tuple[Planes, DeviceState, DeviceOutputs]


def build_step(model: StepModel, layout: BatchLayout) -> Callable[..., StepResult]:
    """The step function of one bucket, to be jitted with `planes` and `device_state` donated."""
    bucket = layout.bucket
    returns_logits = model.returns_logits and bucket.sampling == "full"

    def step(weights: Weights, planes: Planes, device_state: DeviceState, buffer: Int[Array, " size"]) -> StepResult:
        batch = layout.unpack(buffer)
        module = model.structure.module(weights)
        if bucket.mode == "decode":
            rows, positions = decode_window(batch.kv_lens)
        else:
            rows, positions = extend_span(batch.query_starts, batch.kv_lens, bucket.tokens)
        slots = batch.sampling.slot
        tokens = jnp.where(batch.tokens == FROM_DEVICE, device_state.last_tokens[slots[rows]], batch.tokens)
        tables = apply_changes(device_state.tables, batch.changes)
        attention = PagedStep(
            planes=dict(planes),
            arena=model.arena,
            router=model.router,
            bindings=model.bindings,
            tables={group: table[slots] for group, table in tables.items()},
            states=batch.states,
            rows=rows,
            positions=positions,
            query_starts=batch.query_starts if bucket.mode == "extend" else None,
            body_lengths=batch.body_lengths,
            kv_lens=batch.kv_lens,
            implementation=model.attention_implementation,
        )
        hidden = module(tokens, positions, attention)
        last = hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)] if bucket.mode == "extend" else hidden
        logits = module.logits(last)
        result, sampling = _draw(logits, batch.sampling, device_state.sampling, bucket.sampling)
        # Rows that draw nothing write the padding slot.
        target = jnp.where(batch.sampling.samples, slots, 0)
        last_tokens = device_state.last_tokens.at[target].set(result.token)
        outputs = DeviceOutputs(
            pack_outputs(result),
            logits=logits if returns_logits else None,
            hidden=hidden if bucket.mode == "extend" else None,
            expert_ids=_stacked(attention.expert_ids) if model.returns_expert_ids else None,
        )
        return attention.planes, DeviceState(last_tokens, sampling, tables), outputs

    return step


def _stacked(expert_ids: dict[int, Int[Array, "tokens top_k"]]) -> Int16[Array, "tokens moe_layers top_k"]:
    """In the order of the layers; no model has experts that 16 bits do not count."""
    return jnp.stack([expert_ids[layer] for layer in sorted(expert_ids)], axis=1).astype(jnp.int16)


def _draw(
    logits: Float[Array, "rows vocab"], rows: Any, state: SamplingState, mode: str
) -> tuple[SampleResult, SamplingState]:
    if mode == "greedy":
        return sample_greedy(logits), state
    return sample(logits, rows, state)


def pack_outputs(result: SampleResult) -> Int[Array, "rows columns"]:
    """A step's outputs in one array, see `unpack_outputs`."""
    floats = jnp.concatenate([result.logprob[:, None], result.sampling_logprob[:, None], result.top_logprobs], axis=1)
    words = lax.bitcast_convert_type(floats, jnp.int32)
    return jnp.concatenate([result.token[:, None], result.top_ids, words], axis=1)


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """One landed step's outputs on the host; row order is the batch's."""

    tokens: np.ndarray
    logprobs: np.ndarray
    sampling_logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def unpack_outputs(packed: np.ndarray) -> StepOutputs:
    """The fields of a step's packed outputs.

    Args:
        packed: `int32[rows, 3 + 2 * top]`: token, top ids, then the bits of logprob, sampling logprob and top
            logprobs.
    """
    top = (packed.shape[1] - 3) // 2
    floats = packed[:, 1 + top :].view(np.float32)
    return StepOutputs(
        tokens=packed[:, 0],
        logprobs=floats[:, 0],
        sampling_logprobs=floats[:, 1],
        top_ids=packed[:, 1 : 1 + top],
        top_logprobs=floats[:, 2:],
    )
