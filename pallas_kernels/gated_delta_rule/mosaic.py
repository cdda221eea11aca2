"""The gated delta rule by chunks on Hopper GPUs.

With one gate a head: two kernels, one for the terms of all chunks (`terms_mosaic.py`), one that walks them
(`walk_mosaic.py`). With a gate a channel: terms in XLA, and the walk that all recurrences share (`state_scan.py`).
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.gated_delta_rule.chunk_table import ChunkTable
from tokenspeed_jax.pallas_kernels.gated_delta_rule.terms_mosaic import delta_rule_terms_mosaic
from tokenspeed_jax.pallas_kernels.gated_delta_rule.token_lines import TOKENS
from tokenspeed_jax.pallas_kernels.gated_delta_rule.walk_mosaic import delta_rule_walk_mosaic
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
    q, k, v, log_decay, beta = inputs
    dtype = v.dtype
    if log_decay.ndim == 3:
        return state_scan_mosaic(chunk_terms(dtype), tuple(inputs), initial_states, rows, dtype, interpret=interpret)
    q, k = q.astype(dtype), k.astype(dtype)
    table = ChunkTable.cut(rows, v.shape[0], TOKENS)
    terms = delta_rule_terms_mosaic(q, k, v, log_decay, beta, table, interpret=interpret)
    out, states = delta_rule_walk_mosaic(q, k, terms, initial_states.astype(jnp.float32), table, interpret=interpret)
    held = jnp.arange(v.shape[0]) < rows.starts[-1]
    return RecurrentResult(jnp.where(held[:, None, None], out, jnp.zeros((), dtype)), states[0], states[1])
