"""The causal convolution as its definition reads: token after token, with a window of raw inputs as its state."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows, scan_tokens


def causal_convolution_reference(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    windows: Float[Array, "rows channels kept"],
    rows: RecurrentRows,
) -> RecurrentResult:
    """See `causal_convolution`."""

    def token(window: Array, x_now: Array) -> tuple[Array, Array]:
        inputs = jnp.concatenate([window, x_now[:, None].astype(window.dtype)], axis=1)
        out = jnp.sum(inputs.astype(jnp.float32) * weight.astype(jnp.float32), axis=1)
        return inputs[:, 1:], out if bias is None else out + bias.astype(jnp.float32)

    result = scan_tokens(token, x, windows, rows)
    return result._replace(output=result.output.astype(x.dtype))
