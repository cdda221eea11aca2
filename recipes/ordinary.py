"""`OrdinaryRecipe`: keys and values, or latents, of every layer, one row per token, full or sliding."""

from collections.abc import Mapping, Sequence
from typing import Any, override

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import LayerSpec, RecurrentSpec
from tokenspeed_jax.recipes.layers import LayerRecipe, history_fields
from tokenspeed_jax.recipes.spec import CacheFieldSpec, Group, group, layer_group_ids


class OrdinaryRecipe(LayerRecipe):
    """Multi-head, grouped-query and latent attention, hybrids of full and sliding layers included.

    The i-th layer of every group shares the planes `unit.<i>.k` and `unit.<i>.v` (latents use the first alone), so a
    parent is as wide as the deepest group. One block covers P tokens of all layers of its group.
    `checkpoint_granularity` must be None: nothing here has a state to checkpoint.
    """

    family = "ordinary"

    def __init__(self, layers: tuple[LayerSpec, ...], **options: Any) -> None:
        super().__init__(layers, **options)
        if any(isinstance(layer, RecurrentSpec) for layer in layers):
            raise ValueError("the ordinary recipe stores no recurrent state")
        if self.checkpoint_granularity is not None:
            raise ConfigError(
                f"checkpoint_granularity {self.checkpoint_granularity} has no effect: the model has no recurrent layer",
                field="checkpoint_granularity",
            )

    @override
    def groups(self) -> tuple[Group, ...]:
        labels = self.layer_types
        return group(
            labels,
            layer_group_ids(labels, self.windows),
            self.windows,
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
