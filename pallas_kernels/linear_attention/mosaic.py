"""Linear attention by chunks on Hopper GPUs: terms of all chunks in XLA, the walk over them in one kernel."""

from typing import Any

from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.linear_attention.xla import chunk_terms
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows
from tokenspeed_jax.pallas_kernels.state_scan import state_scan_mosaic


def linear_attention_mosaic(
    inputs: Any,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    *,
    interpret: Any = None,
) -> RecurrentResult:
    """See `linear_attention`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    terms_of, dtype = chunk_terms(inputs.v.dtype), inputs.v.dtype
    return state_scan_mosaic(terms_of, tuple(inputs), initial_states, rows, dtype, interpret=interpret)
