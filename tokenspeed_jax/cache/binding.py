"""Binding: which group and fields each layer uses, checked once at start (cache-runtime.md 11).

Storage (how long a group keeps tokens) belongs to the plan, visibility (how far a layer looks back) to the layer.
The binding is where both meet, and it refuses a layer that would look at tokens its group has dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_jax.models.attention import AttentionSpec, LatentAttentionSpec, LayerSpec, RecurrentSpec
from tokenspeed_jax.recipes.layout import CacheFieldLayout, CacheMemoryPlan
from tokenspeed_jax.recipes.spec import CacheGroupSpec

UNLIMITED = -1
"""`window_left` of a layer that sees everything before it."""


@dataclass(frozen=True)
class LayerBinding:
    """Where one layer's cache lives. Hashable and static: part of a compiled step's key.

    Attributes:
        fields: (name, field id) of each of the layer's fields; all are in one group.
        window_left: tokens before the query that the layer sees; 0 is only itself, -1 is all.
    """

    layer_id: int
    group_id: str
    fields: tuple[tuple[str, str], ...]
    window_left: int

    def field(self, name: str) -> str:
        """Id of the field that the layer calls `name`; `KeyError` for one it has not."""
        return dict(self.fields)[name]


def bind_cache_groups(
    layers: Sequence[LayerSpec], plan: CacheMemoryPlan, specs: Sequence[CacheGroupSpec]
) -> tuple[LayerBinding, ...]:
    """One binding per layer, in order.

    Raises:
        ValueError: a layer misses a field, its fields have another geometry or disagree about the group, the group
            is of another family, or the layer sees further back than its group retains.
    """
    spec_of = {spec.group_id: spec for spec in specs}
    fields_of: dict[int, dict[str, CacheFieldLayout]] = {}
    for field in plan.fields:
        layer_id, name = parse_field_id(field.field_id)
        fields_of.setdefault(layer_id, {})[name] = field
    return tuple(_bind(layer, fields_of.get(layer.layer_id, {}), spec_of) for layer in layers)


def parse_field_id(field_id: str) -> tuple[int, str]:
    """(layer id, name) of `layer.<layer id>.<name>`; `ValueError` for any other form."""
    prefix, _, rest = field_id.partition(".")
    number, _, name = rest.partition(".")
    if prefix != "layer" or not number.isdecimal() or not name:
        raise ValueError(f"cache field id {field_id!r} is not of the form layer.<layer id>.<name>")
    return int(number), name


def _rows(layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Shape that each field of the layer must have: of a token's row, or of a whole state block."""
    match layer:
        case AttentionSpec():
            row = (layer.num_kv_heads, layer.head_dim)
            return {"k": row, "v": row}
        case LatentAttentionSpec():
            return {"latent_kv": (1, layer.latent_dim + layer.rope_dim)}
        case RecurrentSpec():
            blocks: dict[str, tuple[int, ...]] = {}
            if layer.convolution is not None:
                channels, width = layer.convolution
                blocks["window"] = (channels, width - 1)
            if layer.state_shape is not None:
                blocks["state"] = layer.state_shape
            return blocks


def _bind(layer: LayerSpec, fields: dict[str, CacheFieldLayout], spec_of: dict[str, CacheGroupSpec]) -> LayerBinding:
    wanted = _rows(layer)
    missing = [name for name in wanted if name not in fields]
    if missing:
        raise ValueError(f"layer {layer.layer_id} has no cache field for {' and '.join(missing)}")
    used = {name: fields[name] for name in wanted}
    groups = {name: field.group_id for name, field in used.items()}
    if len(set(groups.values())) > 1:
        raise ValueError(f"layer {layer.layer_id} keeps its fields in several cache groups: {groups}")
    recurrent = isinstance(layer, RecurrentSpec)
    for name, field in used.items():
        shape = field.shape if recurrent else field.shape[1:]
        if shape != wanted[name]:
            raise ValueError(
                f"cache field {field.field_id!r} has rows of {shape}, layer {layer.layer_id} writes {wanted[name]}"
            )
    group_id = next(iter(groups.values()))
    spec = spec_of[group_id]
    window = layer.sliding_window if isinstance(layer, AttentionSpec) else None
    window_left = UNLIMITED if window is None else window - 1
    if (spec.family == "state") != recurrent:
        reads = "a state" if recurrent else "token rows"
        raise ValueError(f"layer {layer.layer_id} reads {reads}, but cache group {group_id!r} is a {spec.family} group")
    _check_retention(layer.layer_id, window_left, spec)
    names = tuple((name, field.field_id) for name, field in used.items())
    return LayerBinding(layer.layer_id, group_id, names, window_left)


def _check_retention(layer_id: int, window_left: int, spec: CacheGroupSpec) -> None:
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
