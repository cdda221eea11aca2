"""What sampling remembers of each request between steps, on the device.

Every request that is penalised, biased or held to a least length owns one row, named by its request-pool slot.
The rows live in donated arrays: a step reads the rows of its batch and counts the tokens that it draws, so the
next step can be dispatched before the host has seen them.
"""

from collections.abc import Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt8

from tokenspeed_jax.engine.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from tokenspeed_jax.errors import InvalidRequest

MAX_BLOCKED = 64
"""Most ids that one request may hold back until `min_tokens`."""

IN_PROMPT = 1
BLOCKED_AT_FIRST = 2
PADDING_ID = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """One row per request-pool slot; row 0 belongs to padding and means nothing.

    Attributes:
        output_counts: how often the request has generated each token.
        token_flags: bit 0 (`IN_PROMPT`): the token occurs in the prompt; bit 1 (`BLOCKED_AT_FIRST`): it may not be
            drawn before the request's `min_tokens`.
        logit_bias: added to the logits.
    """

    output_counts: Int32[Array, "rows vocab"]
    token_flags: UInt8[Array, "rows vocab"]
    logit_bias: Float32[Array, "rows vocab"]


def init_sampling_state(slots: int, vocab_size: int) -> SamplingState:
    """An empty state for request-pool slots 1..`slots`."""
    shape = (slots + 1, vocab_size)
    return SamplingState(
        output_counts=jnp.zeros(shape, jnp.int32),
        token_flags=jnp.zeros(shape, jnp.uint8),
        logit_bias=jnp.zeros(shape, jnp.float32),
    )


def sampling_state_bytes(slots: int, vocab_size: int) -> int:
    """Device bytes of `init_sampling_state(slots, vocab_size)`."""
    per_token = sum(np.dtype(dtype).itemsize for dtype in (np.int32, np.uint8, np.float32))
    return (slots + 1) * vocab_size * per_token


def begin_request(
    state: SamplingState,
    slot: Int[Array, ""] | int,
    prompt_ids: Int[Array, " prompt"],
    output_ids: Int[Array, " output"],
    bias_ids: Int[Array, " biases"],
    bias_values: Float32[Array, " biases"],
    blocked_ids: Int[Array, " blocked"],
) -> SamplingState:
    """Empties the row of `slot` and fills it for a request that starts or comes back there.

    All id arrays are padded with -1. `output_ids` is what the request had generated before it was retracted.
    Pure; meant to be compiled once with `state` donated. Ids outside the vocabulary are ignored.
    """
    vocab_size = state.output_counts.shape[1]

    def indices(ids: Int[Array, " n"]) -> Int[Array, " n"]:
        return jnp.where(ids < 0, vocab_size, ids)  # a negative index would wrap around instead of being dropped

    def occurs(ids: Int[Array, " n"]) -> Bool[Array, " vocab"]:
        return jnp.zeros(vocab_size, jnp.bool_).at[indices(ids)].set(True, mode="drop")

    counts = jnp.zeros(vocab_size, jnp.int32).at[indices(output_ids)].add(1, mode="drop")
    flags = occurs(prompt_ids) * jnp.uint8(IN_PROMPT) | occurs(blocked_ids) * jnp.uint8(BLOCKED_AT_FIRST)
    bias = jnp.zeros(vocab_size, jnp.float32).at[indices(bias_ids)].set(bias_values, mode="drop")
    return SamplingState(
        output_counts=state.output_counts.at[slot].set(counts),
        token_flags=state.token_flags.at[slot].set(flags),
        logit_bias=state.logit_bias.at[slot].set(bias),
    )


def padded_ids(ids: Collection[int], length: int) -> Int32[np.ndarray, " length"]:
    """`ids` followed by -1 up to `length`. Raises ValueError if there are more."""
    if len(ids) > length:
        raise ValueError(f"{len(ids)} ids do not fit into {length}")
    padded = np.full(length, PADDING_ID, np.int32)
    padded[: len(ids)] = list(ids)
    return padded


def bias_arrays(params: SamplingParams) -> tuple[Int32[np.ndarray, " biases"], Float32[np.ndarray, " biases"]]:
    """`bias_ids` and `bias_values` of `begin_request`."""
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    values[: len(params.logit_bias)] = list(params.logit_bias.values())
    return padded_ids(params.logit_bias.keys(), MAX_LOGIT_BIAS), values


def blocked_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> Int32[np.ndarray, " blocked"]:
    """`blocked_ids` of `begin_request`: every id that would end the sample before its `min_tokens`.

    Raises InvalidRequest when `min_tokens` is set and more than `MAX_BLOCKED` ids would end the sample.
    """
    if params.min_tokens == 0:
        return padded_ids((), MAX_BLOCKED)
    ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    if len(ending) > MAX_BLOCKED:
        raise InvalidRequest(
            f"min_tokens takes at most {MAX_BLOCKED} stop and end-of-sequence ids, got {len(ending)}",
            parameter="stop_token_ids",
        )
    return padded_ids(sorted(ending), MAX_BLOCKED)
