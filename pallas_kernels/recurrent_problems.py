"""Random recurrences over ragged rows, and their definitions in NumPy's float64, for tests and benchmarks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs
from tokenspeed_jax.pallas_kernels.linear_attention import LinearAttentionInputs
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows
from tokenspeed_jax.pallas_kernels.selective_scan import SelectiveScanInputs

EXTREME_DECAYS = np.array([0.0, -1e-6, -0.1, -5.0, -80.0, -1e4, -np.inf])


def ragged_rows(lengths: Sequence[int], bodies: Sequence[int] | None = None) -> RecurrentRows:
    """Rows one after another from token 0; without `bodies` none has a checkpoint."""
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    return RecurrentRows(starts, jnp.asarray(lengths if bodies is None else bodies, jnp.int32))


def random_log_decay(rng: np.random.Generator, shape: tuple[int, ...], extreme: bool) -> np.ndarray:
    """Gates of a trained model's size, or every kind that float32 knows."""
    return rng.choice(EXTREME_DECAYS, shape) if extreme else -np.exp(rng.normal(-2, 2, shape))


def random_delta_rule(
    rng: np.random.Generator,
    tokens: int,
    *,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 8,
    decay_per_channel: bool,
    extreme: bool = False,
    dtype: Any = jnp.float32,
) -> DeltaRuleInputs:
    """Unit keys, queries scaled by key_dim^-1/2, strengths in (0, 1)."""

    def unit() -> np.ndarray:
        x = rng.normal(size=(tokens, key_heads, key_dim))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    gates = (tokens, heads, key_dim) if decay_per_channel else (tokens, heads)
    return DeltaRuleInputs(
        jnp.asarray(unit() * key_dim**-0.5, dtype),
        jnp.asarray(unit(), dtype),
        jnp.asarray(rng.normal(size=(tokens, heads, value_dim)), dtype),
        jnp.asarray(random_log_decay(rng, gates, extreme), jnp.float32),
        jnp.asarray(1 / (1 + np.exp(-2 * rng.normal(size=(tokens, heads)))), jnp.float32),
    )


def random_linear_attention(
    rng: np.random.Generator, tokens: int, *, extreme: bool = False, **shape: Any
) -> LinearAttentionInputs:
    """As `random_delta_rule` without strengths."""
    q, k, v, log_decay, _ = random_delta_rule(rng, tokens, decay_per_channel=False, extreme=extreme, **shape)
    return LinearAttentionInputs(q, k, v, log_decay)


def random_selective_scan(
    rng: np.random.Generator,
    tokens: int,
    *,
    channels: int = 6,
    states: int = 5,
    extreme: bool = False,
    dtype: Any = jnp.float32,
) -> SelectiveScanInputs:
    """Step sizes and rates of a trained model's size; `extreme` has steps from 1e-6 to 1e5."""
    spread = 12.0 if extreme else 1.5
    values = [rng.normal(size=(tokens, size)) for size in (channels, states, states)]
    x, b, c = (jnp.asarray(value, dtype) for value in values)
    step_size = jnp.asarray(np.exp(rng.uniform(-spread, spread - 1, (tokens, channels))), jnp.float32)
    rate = jnp.asarray(-np.exp(rng.normal(size=(channels, states))), jnp.float32)
    return SelectiveScanInputs(x, step_size, b, c, rate)


def _delta_rule_token(state: np.ndarray, token: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, log_decay, beta = token
    q, k = (np.repeat(x, v.shape[0] // x.shape[0], axis=0) for x in (q, k))
    decay = np.exp(log_decay)
    state = state * (decay[:, None, None] if decay.ndim == 1 else decay[:, None, :])
    update = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
    state = state + update[:, :, None] * k[:, None, :]
    return state, np.einsum("hvk,hk->hv", state, q)


def _linear_attention_token(state: np.ndarray, token: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, log_decay = token
    q, k = (np.repeat(x, v.shape[0] // x.shape[0], axis=0) for x in (q, k))
    state = state * np.exp(log_decay)[:, None, None] + v[:, :, None] * k[:, None, :]
    return state, np.einsum("hvk,hk->hv", state, q)


def _selective_scan_token(
    state: np.ndarray, token: Sequence[np.ndarray], rate: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    x, step_size, b, c = token
    state = state * np.exp(step_size[:, None] * rate) + (step_size * x)[:, None] * b
    return state, state @ c


def float64_definition(
    inputs: Any, initial_states: Any, rows: RecurrentRows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(output, body states, final states) of a recurrence, token after token; NaN where nothing is promised."""
    arrays = [np.asarray(x, np.float64) for x in inputs]
    step: Callable[..., tuple[np.ndarray, np.ndarray]]
    if isinstance(inputs, SelectiveScanInputs):
        rate, arrays = arrays[4], arrays[:4]
        step = lambda state, token: _selective_scan_token(state, token, rate)  # noqa: E731
        output = np.full(arrays[0].shape, np.nan)
    else:
        step = _delta_rule_token if isinstance(inputs, DeltaRuleInputs) else _linear_attention_token
        output = np.full(arrays[2].shape, np.nan)
    finals = np.asarray(initial_states, np.float64).copy()
    bodies = np.full_like(finals, np.nan)
    starts, body_lengths = np.asarray(rows.starts), np.asarray(rows.body_lengths)
    for row, body in enumerate(body_lengths):
        for token in range(starts[row], starts[row + 1]):
            finals[row], output[token] = step(finals[row], [x[token] for x in arrays])
            if token == starts[row] + body - 1:
                bodies[row] = finals[row]
    return output, bodies, finals
