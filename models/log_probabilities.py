"""Log-probabilities of given tokens, for scoring and for training: a batch of sequences, one forward pass, no cache."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from tokenspeed_jax.models.experts import expert_layer_ids
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import CausalLM

_ROWS_PER_BLOCK = 256
"""Rows whose logits are held at once: a vocabulary of 256k words takes 256 MiB of them."""


def token_log_probabilities(
    model: CausalLM,
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
    *,
    max_segments: int = 1,
    temperature: float | Float[Array, " batch"] = 1.0,
    remat: bool = False,
    expert_ids: Int[Array, "batch length moe_layers top_k"] | None = None,
) -> Float[Array, "batch length"]:
    """The natural log-probability of every token given those before it in its sequence, in float32.

    Differentiable with respect to the model's parameters, and meant to be called inside a compiled function. Logits
    are made some rows at a time, in the backward pass too.

    Args:
        model: a module of `tokenspeed_jax.models`.
        segment_ids: 0 where a token is padding, on either side; otherwise which sequence of its row a token belongs
            to, from 1 up, the tokens of one sequence together. For one sequence a row this is the mask of its tokens.
            None: every row is one sequence without padding.
        max_segments: most sequences of a row. Where `segment_ids` has more, all results are NaN.
        temperature: what the logits are divided by, above 0; one for all, or one for each row. 1 gives what
            `Sample.logprobs` has, the sampler's temperature what `sampling_logprobs` has if nothing else was set.
        remat: for gradients, keep what goes from layer to layer alone and compute the rest a second time.
        expert_ids: the experts that tokens go to, in the layers that have some, as `Sample.routed_experts` has them:
            the sampler's choice instead of this model's routers'. Gradients of the experts' weights flow as always. A
            token with negative ids goes where the routers send it: so pad with -1, the last token of a sample included.

    Returns:
        For each token its own log-probability; 0 for the first of a sequence, which has nothing before it, and for
        padding.

    Raises:
        ValueError: shapes that do not fit, experts given to a model that has none, `max_segments` below 1, or a
            temperature that is known and not above 0.
    """
    segments = _checked_segments(tokens, segment_ids, max_segments, temperature)
    batch, length = tokens.shape
    starts = _starts(segments)
    # Padding goes on with the sequence before it, which does not see it.
    runs = jnp.cumsum(starts.at[:, 0].set(True), axis=1, dtype=jnp.int32)
    places = jnp.arange(length, dtype=jnp.int32)
    positions = places - lax.cummax(jnp.where(starts, places, 0), axis=1)
    flat_runs = (jnp.arange(batch, dtype=jnp.int32)[:, None] * (max_segments + 2) + runs).reshape(-1)
    # A row's padding in front of its first sequence is a run of its own.
    step = PlainStep(
        flat_runs,
        positions.reshape(-1),
        num_segments=batch * (max_segments + 1),
        row_length=length,
        expert_ids=None if expert_ids is None else _by_layer(model, tokens, expert_ids),
    )
    hidden = model(tokens.reshape(-1), positions.reshape(-1), step, remat=remat)
    divisors = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32).reshape(-1, 1), (batch, length))
    # A token is predicted by the row before it; a sequence's first is not looked at.
    values = _of_targets(model, jnp.roll(hidden, 1, axis=0), tokens.reshape(-1), divisors.reshape(-1))
    values = jnp.where((segments > 0) & ~starts, values.reshape(batch, length), 0.0)
    return jnp.where(segments.max(initial=0) > max_segments, jnp.nan, values)


def _checked_segments(
    tokens: Array, segment_ids: Array | None, max_segments: int, temperature: float | Array
) -> Int[Array, "batch length"]:
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [batch, length], got {tokens.shape}")
    if segment_ids is None:
        segment_ids = jnp.ones(tokens.shape, jnp.int32)
    if segment_ids.shape != tokens.shape:
        raise ValueError(f"segment_ids have shape {segment_ids.shape}, tokens {tokens.shape}")
    if max_segments < 1:
        raise ValueError(f"max_segments must be at least 1, got {max_segments}")
    shape = jnp.shape(temperature)
    if shape not in ((), (tokens.shape[0],)):
        raise ValueError(f"temperature must be one number or [{tokens.shape[0]}], got shape {shape}")
    if not isinstance(temperature, Tracer) and not (np.asarray(temperature) > 0).all():
        raise ValueError(f"temperature must be above 0, got {temperature}")
    return segment_ids.astype(jnp.int32)


def _by_layer(
    model: CausalLM, tokens: Int[Array, "batch length"], expert_ids: Int[Array, "batch length moe_layers top_k"]
) -> Mapping[int, Int[Array, "tokens top_k"]]:
    """Given experts as a `PlainStep` takes them. Raises ValueError where they do not fit the model or the tokens."""
    layers = expert_layer_ids(model)
    if not layers:
        raise ValueError("expert_ids are given, but the model has no experts")
    expected = (*tokens.shape, len(layers))
    if expert_ids.ndim != 4 or expert_ids.shape[:3] != expected:
        raise ValueError(f"expert_ids must be {expected} and top_k, got {expert_ids.shape}")
    flat = expert_ids.reshape(-1, *expert_ids.shape[2:])
    return {layer: flat[:, place] for place, layer in enumerate(layers)}


def _starts(segments: Int[Array, "batch length"]) -> Bool[Array, "batch length"]:
    """Where a sequence begins."""
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    return (segments > 0) & (segments != before)


def _of_targets(
    model: CausalLM,
    hidden: Float[Array, "rows hidden"],
    targets: Int[Array, " rows"],
    divisors: Float[Array, " rows"],
) -> Float[Array, " rows"]:
    """log softmax(logits / divisor) of each row's target, a block of rows at a time."""

    @jax.checkpoint
    def block(rows: tuple[Array, Array, Array]) -> Array:
        logits = model.logits(rows[0]) / rows[2][:, None]
        chosen = jnp.take_along_axis(logits, rows[1][:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    count = hidden.shape[0]
    size = min(_ROWS_PER_BLOCK, count)
    padding = -count % size
    if padding:
        hidden, targets = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
        divisors = jnp.pad(divisors, (0, padding), constant_values=1.0)
    cut = hidden.reshape(-1, size, hidden.shape[-1]), targets.reshape(-1, size), divisors.reshape(-1, size)
    return lax.map(block, cut).reshape(-1)[:count]
