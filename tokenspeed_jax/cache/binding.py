"""Binding: which group and fields each attention layer uses, checked once at start (cache-runtime.md 11).

Storage (how long a group keeps tokens) belongs to the plan, visibility (how far a layer looks back) to the layer.
The binding is where both meet, and it refuses a layer that would look at tokens its group has dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.recipes.layout import CacheFieldLayout, CacheMemoryPlan
from tokenspeed_jax.recipes.spec import CacheGroupSpec

UNLIMITED = -1
"""`window_left` of a layer that sees everything before it."""


@dataclass(frozen=True)
class LayerBinding:
    """Where one layer's keys and values live. Hashable and static: part of a compiled step's key.

    Attributes:
        window_left: tokens before the query that the layer sees; 0 is only itself, -1 is all.
    """

    layer_id: int
    group_id: str
    k_field: str
    v_field: str
    window_left: int


def bind_cache_groups(
    layers: Sequence[AttentionSpec], plan: CacheMemoryPlan, specs: Sequence[CacheGroupSpec]
) -> tuple[LayerBinding, ...]:
    """One binding per layer, in order.

    Raises:
        ValueError: a layer has no key or value field, its fields have another geometry or disagree about the group,
            or the layer sees further back than its group retains.
    """
    spec_of = {spec.group_id: spec for spec in specs}
    fields_of: dict[int, dict[str, CacheFieldLayout]] = {}
    for field in plan.fields:
        layer_id, name = parse_field_id(field.field_id)
        fields_of.setdefault(layer_id, {})[name] = field
    bindings = []
    for layer in layers:
        fields = fields_of.get(layer.layer_id, {})
        missing = [name for name in ("k", "v") if name not in fields]
        if missing:
            raise ValueError(f"layer {layer.layer_id} has no cache field for {' and '.join(missing)}")
        k, v = fields["k"], fields["v"]
        if k.group_id != v.group_id:
            raise ValueError(f"layer {layer.layer_id} keeps keys in {k.group_id!r} and values in {v.group_id!r}")
        for field in (k, v):
            if field.shape[1:] != (layer.num_kv_heads, layer.head_dim):
                raise ValueError(
                    f"cache field {field.field_id!r} has rows of {field.shape[1:]}, layer {layer.layer_id} writes "
                    f"{(layer.num_kv_heads, layer.head_dim)}"
                )
        window_left = UNLIMITED if layer.sliding_window is None else layer.sliding_window - 1
        _check_retention(layer.layer_id, window_left, spec_of[k.group_id])
        bindings.append(LayerBinding(layer.layer_id, k.group_id, k.field_id, v.field_id, window_left))
    return tuple(bindings)


def parse_field_id(field_id: str) -> tuple[int, str]:
    """(layer id, name) of `layer.<layer id>.<name>`; `ValueError` for any other form."""
    prefix, _, rest = field_id.partition(".")
    number, _, name = rest.partition(".")
    if prefix != "layer" or not number.isdecimal() or not name:
        raise ValueError(f"cache field id {field_id!r} is not of the form layer.<layer id>.<name>")
    return int(number), name


def _check_retention(layer_id: int, window_left: int, spec: CacheGroupSpec) -> None:
    if spec.family != "history":
        raise ValueError(f"layer {layer_id} reads token rows, but cache group {spec.group_id!r} is a state group")
    window = spec.sliding_window_tokens
    if window is None:
        return
    if window_left == UNLIMITED:
        raise ValueError(
            f"layer {layer_id} sees its whole history, but cache group {spec.group_id!r} keeps {window} tokens"
        )
    if window_left + 1 > window:
        raise ValueError(
            f"layer {layer_id} sees {window_left + 1} tokens, but cache group {spec.group_id!r} keeps {window}"
        )
