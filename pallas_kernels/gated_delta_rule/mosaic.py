"""The gated delta rule by chunks on Hopper GPUs: terms of all chunks in XLA, the walk over them in one kernel."""

from typing import Any

from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.chunked_states import matmul_precision
from tokenspeed_jax.pallas_kernels.gated_delta_rule.xla import delta_rule_terms
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows
from tokenspeed_jax.pallas_kernels.state_scan import state_scan_mosaic


def gated_delta_rule_mosaic(
    inputs: Any,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    *,
    interpret: Any = None,
) -> RecurrentResult:
    """See `gated_delta_rule`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    dtype = inputs.v.dtype
    precision = matmul_precision(dtype)
    return state_scan_mosaic(
        lambda chunk: delta_rule_terms(*chunk, precision=precision),
        tuple(inputs),
        initial_states,
        rows,
        dtype,
        interpret=interpret,
    )
