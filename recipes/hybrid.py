"""Hybrid recipes: models whose layers carry recurrent state, beside keys and values or latents of other layers."""

from collections.abc import Mapping, Sequence
from typing import override

from tokenspeed_jax.models.attention import RecurrentSpec
from tokenspeed_jax.recipes.layers import LayerRecipe, history_fields
from tokenspeed_jax.recipes.layout import CacheLayout
from tokenspeed_jax.recipes.spec import (
    CacheFieldSpec,
    CacheGroupSpec,
    Group,
    group,
    layer_group_ids,
    split_recurrent_state_groups,
)

STATE_DTYPE = "float32"


class HybridRecipe(LayerRecipe):
    """Recurrent layers dealt into as many state groups as stand in a row between two layers with history.

    The groups then have about equal depth, and the i-th layer of each shares the planes `unit.<i>.a` and
    `unit.<i>.b`: keys and recurrent states on a, values and convolution windows on b (cache-runtime.md 3, E5, E6).
    Keys and states tile their plane exactly, so their ratio fixes how many blocks of each group a parent holds.
    Convolution windows have the dtype of keys and values, states are float32.
    """

    family = "hybrid"
    alignment = 256
    # No padding limit: states and keys of small models differ by ratios that no bound fits. The start-up report shows
    # what is lost.

    def group_ids(self) -> tuple[str, ...]:
        """Group of each layer: state layers by their place in a run, all in one where no layer has history."""
        labels = self.layer_types
        history = layer_group_ids(labels, self.windows)
        if all(label == "linear_attention" for label in labels):
            return history
        states = split_recurrent_state_groups(labels)
        return tuple(
            state if label == "linear_attention" else group_id
            for label, state, group_id in zip(labels, states, history, strict=True)
        )

    @override
    def groups(self) -> tuple[Group, ...]:
        return group(
            self.layer_types,
            self.group_ids(),
            self.windows,
            self.prefix_granularity,
            self.fields_for_layer,
            checkpoint_granularity=self.checkpoint_granularity,
            with_transfer_policy=self.limits.role != "Fused",
        )

    def fields_for_layer(self, layer_id: int, group_id: str, occurrence: int) -> tuple[CacheFieldSpec, ...]:
        del group_id
        layer = self.layers[layer_id]
        planes = (f"unit.{occurrence}.a", f"unit.{occurrence}.b")
        if not isinstance(layer, RecurrentSpec):
            return history_fields(layer, self.prefix_granularity, self.kv_dtype, planes)
        fields = []
        if layer.state_shape is not None:
            fields.append(CacheFieldSpec(f"layer.{layer_id}.state", planes[0], layer.state_shape, STATE_DTYPE))
        if layer.convolution is not None:
            plane = planes[0] if layer.state_shape is None else planes[1]
            fields.append(window_field(layer_id, layer.convolution, plane, self.kv_dtype))
        return tuple(fields)

    @override
    def token_capacity(self, layout: CacheLayout, specs: Sequence[CacheGroupSpec], num_lcm_blocks: int) -> int:
        """Tokens of the history group that packs densest, if it had the arena; of the state groups without one."""
        history = [spec for spec in specs if spec.family == "history"] or list(specs)
        return super().token_capacity(layout, history, num_lcm_blocks)


class KdaHybridRecipe(HybridRecipe):
    """Kimi Linear: latents, and states of Kimi Delta Attention in three groups of consecutive layers (E4).

    A layer's window and state stand together on the plane `slot.<i>` that the i-th latent also uses. The packing
    follows from how many latent pages one state fills.
    """

    family = "kda_hybrid"
    num_state_groups = 3

    @override
    def group_ids(self) -> tuple[str, ...]:
        """The ordered state layers are cut into thirds, the first ones longer."""
        states = [index for index, layer in enumerate(self.layers) if isinstance(layer, RecurrentSpec)]
        third, longer = divmod(len(states), self.num_state_groups)
        sizes = [third + (index < longer) for index in range(self.num_state_groups)]
        names = [f"linear_attention_{index}" for index, size in enumerate(sizes) for _ in range(size)]
        of_layer = dict(zip(states, names, strict=True))
        return tuple(of_layer.get(index, label) for index, label in enumerate(self.layer_types))

    @override
    def fields_for_layer(self, layer_id: int, group_id: str, occurrence: int) -> tuple[CacheFieldSpec, ...]:
        del group_id
        layer = self.layers[layer_id]
        plane = f"slot.{occurrence}"
        if not isinstance(layer, RecurrentSpec):
            return history_fields(layer, self.prefix_granularity, self.kv_dtype, (plane,))
        assert layer.state_shape is not None
        assert layer.convolution is not None
        state = CacheFieldSpec(
            f"layer.{layer_id}.state", plane, layer.state_shape, STATE_DTYPE, exact_page_stride=False
        )
        return (window_field(layer_id, layer.convolution, plane, self.kv_dtype), state)

    @override
    def packing(self, groups: Sequence[Group]) -> Mapping[str, int] | None:
        """As many latent pages as cover one state; as many states as those pages hold."""
        on_first = {
            spec.group_id: sum(field.payload_bytes for field in fields if field.plane_id == "slot.0")
            for spec, fields in groups
        }
        history = [spec.group_id for spec, _ in groups if spec.family == "history"]
        state_bytes = max(size for group_id, size in on_first.items() if group_id not in history)
        page_bytes = max(on_first[group_id] for group_id in history)
        pages = max(1, -(-state_bytes // page_bytes))
        return {
            group_id: pages if group_id in history else max(1, pages * page_bytes // size)
            for group_id, size in on_first.items()
        }


def window_field(layer_id: int, convolution: tuple[int, int], plane_id: str, dtype: str) -> CacheFieldSpec:
    """The raw inputs that a convolution carries, newest last; its kernel takes any stride."""
    channels, width = convolution
    return CacheFieldSpec(f"layer.{layer_id}.window", plane_id, (channels, width - 1), dtype, exact_page_stride=False)
