"""The residual sum and the norm after it for Hopper GPUs, written with Mosaic GPU.

    grid: (token,); one block = one warpgroup = one row

    x[token], update[token]  --128-bit loads-->  sum = round(x + update)           stored to total[token]
                                                 sum of squares over the warpgroup  (the only wait but memory's)
    weight                   --128-bit loads-->  norm of the sum                    stored to normed[token]

A row stays in registers between its two uses. Memory sets the pace of long prompts, latency that of decode steps; two
and four rows a block, which share the weights, took 1 % longer at 8,192 rows of 4,096 (H200).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.norm_rules import NormRule

THREADS = 128
VECTOR_BYTES = 16
# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any


def vector_length(dim: int, itemsize: int) -> int | None:
    """Elements of a thread's vector in a row of `dim`; None where the row is no whole number of vectors."""
    for length in (VECTOR_BYTES // itemsize, VECTOR_BYTES // itemsize // 2, VECTOR_BYTES // itemsize // 4):
        if length and dim % (THREADS * length) == 0:
            return length
    return None


@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def add_norm_mosaic(
    x: Float[Array, "tokens dim"],
    update: Float[Array, "tokens dim"],
    weight: Float[Array, " dim"],
    *,
    rule: NormRule,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens dim"]]:
    """See `add_norm`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    tokens, dim = x.shape
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=vector_length(dim, x.dtype.itemsize))
    kernel = plgpu.kernel(
        functools.partial(_block, rule=rule, layout=layout),
        out_type=[row, row],
        grid=(tokens,),
        compiler_params=plgpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
        grid_names=("token",),
        interpret=interpret,
        kernel_name="add_norm",
    )
    total, normed = kernel(x, update, weight)
    return total, normed


def _block(
    x_ref: Ref, update_ref: Ref, weight_ref: Ref, total_ref: Ref, normed_ref: Ref, *, rule: NormRule, layout: Any
) -> None:
    token = lax.axis_index("token")
    load = functools.partial(gpu.load, layout=layout, optimized=False)
    x, update, weight = load(x_ref.at[token]), load(update_ref.at[token]), load(weight_ref)
    total = x + update
    total_ref[token] = total
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) * (1.0 / x_ref.shape[1]) + rule.epsilon)
    normed_ref[token] = rule.weigh(wide * scale, weight, total.dtype)
