"""The feed-forward block of mixture-of-experts models: every token through the few experts that its router chose."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.experts.activations import Activation, GatedActivation
from tokenspeed_jax.pallas_kernels.experts.mosaic import expert_mlp_mosaic, mosaic_shape_refusal
from tokenspeed_jax.pallas_kernels.experts.reference import expert_mlp_reference
from tokenspeed_jax.pallas_kernels.experts.routing import (
    RoutingRule,
    best_experts,
    expert_scores,
    expert_weights,
    route,
)
from tokenspeed_jax.pallas_kernels.experts.weights import ExpertWeights
from tokenspeed_jax.pallas_kernels.experts.xla import expert_mlp_xla
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)

__all__ = [
    "Activation",
    "RoutingRule",
    "best_experts",
    "expert_mlp",
    "expert_scores",
    "expert_weights",
    "mosaic_refusal",
    "route",
]


def mosaic_refusal(*, hidden: int, inner: int, top_k: int, dtypes: set[str]) -> str | None:
    """Why the kernels for Hopper GPUs cannot serve these experts on the default device; None when they can.

    Args:
        dtypes: of the tokens and of both weights.
    """
    return hopper_refusal() or mosaic_shape_refusal(hidden=hidden, inner=inner, top_k=top_k, dtypes=dtypes)


def expert_mlp(
    x: Float[Array, "tokens hidden"],
    gate_up: Float[Array, "experts 2*inner hidden"],
    down: Float[Array, "experts hidden inner"],
    expert_ids: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    *,
    activation: Activation = "swiglu",
    gate_up_bias: Float[Array, "experts 2*inner"] | None = None,
    down_bias: Float[Array, "experts hidden"] | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens hidden"]:
    """out[t] = sum_j weights[t, j] (down[e] f(gate_up[e] x[t] + gate_up_bias[e]) + down_bias[e]), e = expert_ids[t, j].

    Products accumulate in float32, f is computed in float32 and rounded to x's dtype before `down`, and the sum runs in
    float32 in the order of j, of choices that `mosaic` has rounded to x's dtype. A token's result depends on no other
    token; what a padding token holds, NaN included, stays in its own row.

    Args:
        gate_up: the gate's rows first, then the up projection's.
        expert_ids: in `[0, experts)`, as `route` gives them.
        activation, alpha, limit: f, see `GatedActivation`.
        implementation: None takes the fastest that serves the call.

    Returns:
        In x's dtype.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    function = GatedActivation(activation, alpha, limit)
    experts = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    check_implementation(implementation)
    _check_shapes(x, experts, expert_ids, weights)
    refusal = mosaic_refusal(
        hidden=x.shape[1],
        inner=down.shape[2],
        top_k=expert_ids.shape[1],
        dtypes={x.dtype.name, gate_up.dtype.name, down.dtype.name},
    )
    implementation = choose_implementation(implementation, refusal)
    functions = {"reference": expert_mlp_reference, "xla": expert_mlp_xla, "mosaic": expert_mlp_mosaic}
    with jax.named_scope("expert_mlp"):
        return functions[implementation](x, experts, expert_ids, weights, function)


def _check_shapes(x: jax.Array, experts: ExpertWeights, expert_ids: jax.Array, weights: jax.Array) -> None:
    """Raises ValueError where tokens, choices and weights do not fit together."""
    if x.ndim != 2 or experts.gate_up.ndim != 3 or experts.gate_up.shape[1] % 2:
        raise ValueError(
            f"x must be [tokens, hidden] and gate_up [experts, 2 * inner, hidden], got {x.shape} and "
            f"{experts.gate_up.shape}"
        )
    num_experts, rows, hidden = experts.gate_up.shape
    if x.shape[1] != hidden or experts.down.shape != (num_experts, hidden, rows // 2):
        raise ValueError(
            f"x {x.shape}, gate_up {experts.gate_up.shape} and down {experts.down.shape} do not fit together"
        )
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0] or not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(
            f"expert_ids must be integers [{x.shape[0]}, top_k], got {expert_ids.dtype}{list(expert_ids.shape)}"
        )
    if weights.shape != expert_ids.shape:
        raise ValueError(f"weights have shape {weights.shape}, expert_ids {expert_ids.shape}")
    for name, bias, shape in (
        ("gate_up_bias", experts.gate_up_bias, (num_experts, rows)),
        ("down_bias", experts.down_bias, (num_experts, hidden)),
    ):
        if bias is not None and bias.shape != shape:
            raise ValueError(f"{name} has shape {bias.shape}, expected {shape}")
