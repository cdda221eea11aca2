"""MXFP4 weights (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats that share one power of two.

A checkpoint keeps them as bytes: `blocks [..., in / 32, 16]`, two e2m1 values a byte, the low four bits first, and
`scales [..., in / 32]`, e8m0, 2^(byte - 127) with 255 for NaN. Here they are expanded when they are loaded. The values
are exact in bfloat16: e2m1 has one bit of mantissa.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32  # values that share a scale
BLOCK_BYTES = BLOCK // 2

_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # by code; the highest of the four bits is the sign
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def dequantize(
    blocks: UInt8[Array, "*rows blocks 16"], scales: UInt8[Array, "*rows blocks"], dtype: DTypeLike
) -> Float[Array, "*rows in"]:
    """The values of the last axis, `in = 32 * blocks`, computed in float32 and rounded to `dtype`."""
    codes = jnp.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    values = jnp.asarray(E2M1)[codes] * jnp.asarray(E8M0)[scales][..., None]
    return values.astype(dtype).reshape(*scales.shape[:-1], -1)
