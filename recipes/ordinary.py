"""`OrdinaryRecipe`: keys and values, or latents, of every layer, one row per token, full or sliding."""

from collections.abc import Mapping, Sequence
from typing import override

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import LayerSpec, RecurrentSpec
from tokenspeed_jax.recipes.base import NO_PADDING_LIMIT, CacheRecipe, SchedulerLimits
from tokenspeed_jax.recipes.layers import check_layers, history_fields, kv_head_count, storage_label, window_of
from tokenspeed_jax.recipes.spec import CacheFieldSpec, Group, group, layer_group_ids, require_positive_int


class OrdinaryRecipe(CacheRecipe):
    """Multi-head, grouped-query and latent attention, hybrids of full and sliding layers included.

    The i-th layer of every group shares the planes `unit.<i>.k` and `unit.<i>.v` (latents use the first alone), so a
    parent is as wide as the deepest group. One block covers P tokens of all layers of its group.

    Args:
        layers: the model's attention layers, layer ids 0, 1, 2, ... in order.
        kv_dtype: element type of keys, values and latents.
        prefix_granularity: P, tokens; also the block granularity of every group.
        checkpoint_granularity: must be None: nothing here has a state to checkpoint.
    """

    family = "ordinary"
    max_padding_fraction = NO_PADDING_LIMIT

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        *,
        kv_dtype: str,
        prefix_granularity: int,
        checkpoint_granularity: int | None = None,
        budget_bytes: int,
        token_limit: int | None = None,
        limits: SchedulerLimits,
    ) -> None:
        super().__init__(budget_bytes=budget_bytes, token_limit=token_limit, limits=limits)
        check_layers(layers, kv_dtype)
        if any(isinstance(layer, RecurrentSpec) for layer in layers):
            raise ValueError("the ordinary recipe stores no recurrent state")
        if checkpoint_granularity is not None:
            raise ConfigError(
                f"checkpoint_granularity {checkpoint_granularity} has no effect: the model has no recurrent layer",
                field="checkpoint_granularity",
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
        return tuple(storage_label(layer) for layer in self.layers)

    @property
    @override
    def layer_kv_head_counts(self) -> tuple[int, ...]:
        return tuple(kv_head_count(layer) for layer in self.layers)

    @override
    def groups(self) -> tuple[Group, ...]:
        windows = tuple(window_of(layer) for layer in self.layers)
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
        assert not isinstance(layer, RecurrentSpec)
        planes = tuple(f"unit.{occurrence}.{name}" for name in "kv")
        return history_fields(layer, self.prefix_granularity, self.kv_dtype, planes)

    @override
    def packing(self, groups: Sequence[Group]) -> Mapping[str, int] | None:
        """One block per parent, unless layers differ in geometry and the groups' ratios must be found."""
        if len({field.shape for _, fields in groups for field in fields}) > 1:
            return None
        return {spec.group_id: 1 for spec, _ in groups}
