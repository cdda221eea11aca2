"""Random expert problems, for the tests and the benchmark."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Load = Literal["even", "one", "few"]


class ExpertProblem(NamedTuple):
    """Arguments of `expert_mlp`."""

    x: Float[Array, "tokens hidden"]
    gate_up: Float[Array, "experts 2*inner hidden"]
    down: Float[Array, "experts hidden inner"]
    expert_ids: Int[Array, "tokens top_k"]
    expert_weights: Float[Array, "tokens top_k"]
    gate_up_bias: Float[Array, "experts 2*inner"] | None = None
    down_bias: Float[Array, "experts hidden"] | None = None

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        *,
        tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        inner: int,
        load: Load = "even",
        dtype: DTypeLike = jnp.float32,
        bias: bool = False,
    ) -> "ExpertProblem":
        """Values around 1 throughout.

        Args:
            load: `even` draws every expert alike; `one` sends the first choice of all tokens to the last expert; `few`
                leaves all but about twice `top_k` experts empty.
        """
        open_experts = np.arange(num_experts)
        if load == "few":
            open_experts = rng.permutation(num_experts)[: min(num_experts, 2 * top_k)]
        ids = np.stack([rng.permutation(open_experts)[:top_k] for _ in range(tokens)])
        if load == "one":
            last = num_experts - 1
            ids = np.stack([np.concatenate([[last], row[row != last]])[:top_k] for row in ids])
        weights = rng.uniform(0.1, 1.0, (tokens, top_k))

        key = jax.random.key(int(rng.integers(2**31)))
        keys = iter(jax.random.split(key, 5))

        def normal(*shape: int, scale: float = 1.0) -> Array:
            return (scale * jax.random.normal(next(keys), shape, jnp.dtype(dtype))).astype(dtype)

        return cls(
            normal(tokens, hidden),
            normal(num_experts, 2 * inner, hidden, scale=hidden**-0.5),
            normal(num_experts, hidden, inner, scale=inner**-0.5),
            jnp.asarray(ids, jnp.int32),
            jnp.asarray(weights / weights.sum(-1, keepdims=True), jnp.float32),
            normal(num_experts, 2 * inner) if bias else None,
            normal(num_experts, hidden) if bias else None,
        )

    def arguments(self) -> tuple[Array, Array, Array, Array, Array]:
        """Positional arguments of `expert_mlp`."""
        return self.x, self.gate_up, self.down, self.expert_ids, self.expert_weights

    def biases(self) -> dict[str, Array | None]:
        """Its bias arguments."""
        return {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
