"""The causal convolution in plain JAX: `width` shifted products, fused into one pass over the tokens.

XLA makes one kernel of it, so there is no other. Every token reads its earlier inputs from the packed tokens, or from
its row's window where they precede the row.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows


def causal_convolution_xla(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    windows: Float[Array, "rows channels kept"],
    rows: RecurrentRows,
) -> RecurrentResult:
    """See `causal_convolution`."""
    tokens, width = x.shape[0], weight.shape[1]
    row = jnp.minimum(rows.row_of_token(tokens), rows.num_rows - 1)
    local = jnp.arange(tokens) - rows.starts[row]
    total = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for back in range(width - 1, -1, -1):
        earlier = jnp.pad(x, ((back, 0), (0, 0)))[:tokens]
        if back:
            before = windows[row, :, jnp.clip(width - 1 - back + local, 0, width - 2)]
            earlier = jnp.where((local >= back)[:, None], earlier, before.astype(x.dtype))
        total = total + earlier.astype(jnp.float32) * weight[:, width - 1 - back].astype(jnp.float32)
    starts = rows.starts[:-1]
    body = _windows_at(x, windows, starts, rows.body_lengths)
    final = _windows_at(x, windows, starts, rows.lengths)
    return RecurrentResult(total.astype(x.dtype), body, final)


def _windows_at(
    x: Float[Array, "tokens channels"],
    windows: Float[Array, "rows channels kept"],
    starts: Int[Array, " rows"],
    lengths: Int[Array, " rows"],
) -> Float[Array, "rows channels kept"]:
    """The raw inputs before local token `lengths` of each row (cache-runtime.md 17.3)."""
    kept = windows.shape[2]
    local = lengths[:, None] - kept + jnp.arange(kept)
    fresh = x.at[starts[:, None] + jnp.maximum(local, 0)].get(mode="clip")
    old = jnp.take_along_axis(windows, jnp.clip(local + kept, 0, kept - 1)[:, None, :], axis=2)
    return jnp.where((local >= 0)[:, None, :], fresh.transpose(0, 2, 1).astype(windows.dtype), old)


def causal_convolution_step_xla(
    x: Float[Array, "rows channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    windows: BlockView,
    source_blocks: Int[Array, " rows"],
    target_blocks: Int[Array, " rows"],
) -> tuple[Float[Array, "rows channels"], BlockView]:
    """See `causal_convolution_step`."""
    inputs = jnp.concatenate([windows.take(source_blocks), x[:, :, None].astype(windows.dtype)], axis=2)
    out = jnp.sum(inputs.astype(jnp.float32) * weight.astype(jnp.float32), axis=2)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out.astype(x.dtype), windows.write(target_blocks, inputs[:, :, 1:])
