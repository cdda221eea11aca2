"""The gated delta rule by chunks on Hopper GPUs: terms of all chunks in XLA, the walk over them in one kernel."""

from typing import Any

from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.gated_delta_rule.xla import chunk_terms
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
    terms_of, dtype = chunk_terms(inputs.v.dtype), inputs.v.dtype
    return state_scan_mosaic(terms_of, tuple(inputs), initial_states, rows, dtype, interpret=interpret)
