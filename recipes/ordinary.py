"""`OrdinaryRecipe`: keys and values of every layer, one row per token, full or sliding."""

from collections.abc import Mapping, Sequence
from typing import override

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.recipes.base import NO_PADDING_LIMIT, CacheRecipe, SchedulerLimits
from tokenspeed_jax.recipes.spec import CacheFieldSpec, Group, group, layer_group_ids, require_positive_int

KV_DTYPES = ("bfloat16", "float16", "float32")


class OrdinaryRecipe(CacheRecipe):
    """Multi-head and grouped-query attention, hybrids of full and sliding layers included.

    The i-th layer of every group shares the planes `unit.<i>.k` and `unit.<i>.v`, so a parent is as wide as the
    deepest group. One block covers P tokens of all layers of its group.

    Args:
        layers: the model's attention layers, layer ids 0, 1, 2, ... in order.
        kv_dtype: element type of keys and values.
        prefix_granularity: P, tokens; also the block granularity of every group.
    """

    family = "ordinary"
    max_padding_fraction = NO_PADDING_LIMIT

    def __init__(
        self,
        layers: tuple[AttentionSpec, ...],
        *,
        kv_dtype: str,
        prefix_granularity: int,
        budget_bytes: int,
        token_limit: int | None = None,
        limits: SchedulerLimits,
    ) -> None:
        super().__init__(budget_bytes=budget_bytes, token_limit=token_limit, limits=limits)
        if not layers:
            raise ValueError("the model declares no attention layer")
        for position, layer in enumerate(layers):
            if layer.layer_id != position:
                raise ValueError(f"attention layer {position} declares layer_id {layer.layer_id}")
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(
                f"the cache's dtype must be one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}", field="dtype"
            )
        self.layers = layers
        self.kv_dtype = kv_dtype
        self._prefix_granularity = require_positive_int("prefix_granularity", prefix_granularity)

    @property
    @override
    def prefix_granularity(self) -> int:
        return self._prefix_granularity

    @property
    @override
    def layer_types(self) -> tuple[str, ...]:
        return tuple("full_attention" if layer.sliding_window is None else "sliding_attention" for layer in self.layers)

    @property
    @override
    def layer_kv_head_counts(self) -> tuple[int, ...]:
        return tuple(layer.num_kv_heads for layer in self.layers)

    @override
    def groups(self) -> tuple[Group, ...]:
        windows = tuple(layer.sliding_window for layer in self.layers)
        labels = self.layer_types
        return group(
            labels,
            layer_group_ids(labels, windows),
            windows,
            self.prefix_granularity,
            self.fields_for_layer,
            with_transfer_policy=self.limits.role != "Fused",
        )

    def fields_for_layer(self, layer_id: int, group_id: str, occurrence: int) -> tuple[CacheFieldSpec, ...]:
        del group_id
        layer = self.layers[layer_id]
        shape = (self.prefix_granularity, layer.num_kv_heads, layer.head_dim)
        return tuple(
            CacheFieldSpec(f"layer.{layer_id}.{name}", f"unit.{occurrence}.{name}", shape, self.kv_dtype)
            for name in ("k", "v")
        )

    @override
    def packing(self, groups: Sequence[Group]) -> Mapping[str, int] | None:
        """One block per parent, unless layers differ in geometry and the groups' ratios must be found."""
        if len({(layer.num_kv_heads, layer.head_dim) for layer in self.layers}) > 1:
            return None
        return {spec.group_id: 1 for spec, _ in groups}
