"""What the layers of a model store: groups, fields, and the walk that turns layers into groups.

Everything here is a frozen dataclass of Python numbers and strings: no arrays, no device. Sizes are bytes, spans
are tokens, and no value is both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Family = Literal["history", "state"]
Retention = Literal["full_history", "sliding_window"]
TransferPolicy = Literal["full_suffix", "latest_snapshot"]

ELEMENT_BYTES: dict[str, int] = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""The canonical dtype names a field may have. They enter signatures, so no other spelling is accepted."""


def require_positive_int(name: str, value: object) -> int:
    """`value` if it is an int above 0 and not a bool; `ValueError` naming it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def element_bytes(dtype: str) -> int:
    """Bytes of one element; `ValueError` for a name outside `ELEMENT_BYTES`."""
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    return ELEMENT_BYTES[dtype]


@dataclass(frozen=True)
class CacheGroupSpec:
    """What one cache group is: which tokens it keeps and what one of its blocks spans (cache-runtime.md 2.1).

    A history group declares `rows_per_page` rows of `entry_stride_tokens` tokens each; a state group declares
    `checkpoint_granularity`. A spec that mixes the two shapes, or leaves one half out, raises `ValueError`.
    """

    group_id: str
    family: Family
    retention: Retention
    replayable: bool
    rows_per_page: int | None = None
    entry_stride_tokens: int | None = None
    checkpoint_granularity: int | None = None
    sliding_window_tokens: int | None = None
    shard_count: int = 1
    transfer_policy: TransferPolicy | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.group_id, str) or not self.group_id:
            raise ValueError(f"group_id must be a non-empty string, got {self.group_id!r}")
        where = f"cache group {self.group_id!r}: "
        if self.family not in ("history", "state"):
            raise ValueError(f"{where}family must be history or state, got {self.family!r}")
        if self.retention not in ("full_history", "sliding_window"):
            raise ValueError(f"{where}retention must be full_history or sliding_window, got {self.retention!r}")
        self._check_shape(where)
        self._check_window(where)
        require_positive_int(f"{where}shard_count", self.shard_count)
        if not isinstance(self.replayable, bool):
            raise ValueError(f"{where}replayable must be true or false, got {self.replayable!r}")
        if self.replayable and (self.family, self.retention) != ("history", "sliding_window"):
            raise ValueError(f"{where}only a sliding history group can be replayable")
        policy = "latest_snapshot" if self.family == "state" else "full_suffix"
        if self.transfer_policy not in (None, policy):
            raise ValueError(f"{where}transfer_policy must be {policy}, got {self.transfer_policy!r}")

    def _check_shape(self, where: str) -> None:
        rows = (self.rows_per_page, self.entry_stride_tokens)
        if self.family == "history":
            if self.checkpoint_granularity is not None:
                raise ValueError(f"{where}a history group has rows, not a checkpoint_granularity")
            require_positive_int(f"{where}rows_per_page", rows[0])
            require_positive_int(f"{where}entry_stride_tokens", rows[1])
            return
        if rows != (None, None):
            raise ValueError(f"{where}a state group has a checkpoint_granularity, not rows_per_page x stride")
        if self.retention != "full_history":
            raise ValueError(f"{where}a state group retains full history, got {self.retention}")
        require_positive_int(f"{where}checkpoint_granularity", self.checkpoint_granularity)

    def _check_window(self, where: str) -> None:
        if self.retention == "sliding_window":
            require_positive_int(f"{where}sliding_window_tokens", self.sliding_window_tokens)
        elif self.sliding_window_tokens is not None:
            raise ValueError(f"{where}sliding_window_tokens is set on a group that retains full history")

    @property
    def page_size(self) -> int:
        """Tokens of one page; `TypeError` on a state group, which has blocks and no pages."""
        if self.rows_per_page is None or self.entry_stride_tokens is None:
            raise TypeError(f"cache group {self.group_id!r} is a state group: it has a block_granularity, no page_size")
        return self.rows_per_page * self.entry_stride_tokens

    @property
    def block_granularity(self) -> int:
        """Tokens that one slot of the group's block table covers."""
        return self.page_size if self.checkpoint_granularity is None else self.checkpoint_granularity


@dataclass(frozen=True)
class CacheFieldSpec:
    """The bytes one layer deposits in one block of a group (cache-runtime.md 2.2).

    Attributes:
        field_id: `layer.<layer id>.<name>`, unique in the plan.
        plane_id: the plane of the parent that holds it; fields of different groups on one plane share its bytes.
        shape: payload of one block, in elements of `dtype`.
        exact_page_stride: the kernel steps from page to page by the payload, so nothing may lie between pages.
        page_stride_alignment_bytes: the page stride must be a multiple of it.
    """

    field_id: str
    plane_id: str
    shape: tuple[int, ...]
    dtype: str
    exact_page_stride: bool = True
    page_stride_alignment_bytes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("field_id", self.field_id), ("plane_id", self.plane_id)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        if not self.shape:
            raise ValueError(f"cache field {self.field_id!r}: shape must have at least one extent")
        for extent in self.shape:
            require_positive_int(f"cache field {self.field_id!r}: extent", extent)
        require_positive_int(
            f"cache field {self.field_id!r}: page_stride_alignment_bytes", self.page_stride_alignment_bytes
        )
        element_bytes(self.dtype)

    @property
    def payload_bytes(self) -> int:
        return math.prod(self.shape) * element_bytes(self.dtype)


Group = tuple[CacheGroupSpec, tuple[CacheFieldSpec, ...]]
"""One declared group: what it is, and the fields of its layers."""

FieldsForLayer = Callable[[int, str, int], Sequence[CacheFieldSpec]]
"""(layer id, group id, occurrence) -> the layer's fields; occurrence counts earlier layers of the group with fields."""

_FULL_LABELS = ("full_attention", "deepseek_sparse_attention")


def storage_kind(label: str) -> tuple[Family, Retention]:
    """Family and retention of a storage label; `ValueError` for an unknown one."""
    if label in _FULL_LABELS:
        return "history", "full_history"
    if label == "sliding_attention" or label.startswith("sliding_attention_"):
        return "history", "sliding_window"
    if label == "linear_attention":
        return "state", "full_history"
    raise ValueError(
        f"unknown storage label {label!r}: expected {', '.join(_FULL_LABELS)}, sliding_attention, "
        "sliding_attention_<k> or linear_attention"
    )


def layer_windows(labels: Sequence[str], windows: int | Sequence[int | None] | None) -> tuple[int | None, ...]:
    """One window per layer: a scalar goes to the sliding layers only, a sequence must be None at all others."""
    sliding = [storage_kind(label)[1] == "sliding_window" for label in labels]
    if windows is None or isinstance(windows, int):
        per_layer: tuple[int | None, ...] = tuple(windows if slides else None for slides in sliding)
    else:
        per_layer = tuple(windows)
    if len(per_layer) != len(labels):
        raise ValueError(f"{len(per_layer)} windows for {len(labels)} layers")
    for layer_id, (slides, window) in enumerate(zip(sliding, per_layer, strict=True)):
        if slides:
            require_positive_int(f"window of sliding layer {layer_id}", window)
        elif window is not None:
            raise ValueError(f"layer {layer_id} ({labels[layer_id]}) retains everything but has window {window}")
    return per_layer


def layer_group_ids(labels: Sequence[str], windows: int | Sequence[int | None] | None) -> tuple[str, ...]:
    """Group of each layer: its label, with the window appended where one label occurs with several windows."""
    per_layer = layer_windows(labels, windows)
    windows_of: dict[str, set[int | None]] = {}
    for label, window in zip(labels, per_layer, strict=True):
        windows_of.setdefault(label, set()).add(window)
    return tuple(
        label if len(windows_of[label]) == 1 else f"{label}_{window}"
        for label, window in zip(labels, per_layer, strict=True)
    )


def split_recurrent_state_groups(labels: Sequence[str]) -> tuple[str, ...]:
    """Group of each layer when state layers are dealt by their position in a run: S S S F -> _0 _1 _2 full."""
    group_ids = []
    position = 0
    for label in labels:
        if storage_kind(label)[0] == "state":
            group_ids.append(f"{label}_{position}")
            position += 1
        else:
            group_ids.append(label)
            position = 0
    return tuple(group_ids)


def hybrid_slab_group_size(labels: Sequence[str], windows: int | Sequence[int | None] | None) -> int | None:
    """Layers of the deepest label, if two labels or more share slabs under one window; None otherwise."""
    distinct = {window for window in layer_windows(labels, windows) if window is not None}
    counts = {label: list(labels).count(label) for label in labels}
    if len(counts) < 2 or len(distinct) != 1 or any(storage_kind(label)[0] == "state" for label in counts):
        return None
    return max(counts.values())


def group(
    labels: Sequence[str],
    group_ids: Sequence[str],
    windows: int | Sequence[int | None] | None,
    prefix_granularity: int,
    fields_for_layer: FieldsForLayer,
    *,
    checkpoint_granularity: int | None = None,
    with_transfer_policy: bool = False,
) -> tuple[Group, ...]:
    """Groups in order of first appearance, one walk over the layers (cache-runtime.md 4).

    Args:
        checkpoint_granularity: tokens that a block of a state group spans; None takes the prefix granularity.

    Raises:
        ValueError: two layers name one group with different retention, window or family, or no layer of a group
            declares a field.
    """
    require_positive_int("prefix_granularity", prefix_granularity)
    if len(group_ids) != len(labels):
        raise ValueError(f"{len(group_ids)} group ids for {len(labels)} layers")
    kinds: dict[str, tuple[Family, Retention, int | None]] = {}
    fields: dict[str, list[CacheFieldSpec]] = {}
    occurrences: dict[str, int] = {}
    per_layer = layer_windows(labels, windows)
    for layer_id, (label, group_id, window) in enumerate(zip(labels, group_ids, per_layer, strict=True)):
        kind = (*storage_kind(label), window)
        if kinds.setdefault(group_id, kind) != kind:
            raise ValueError(f"layer {layer_id} puts {kind} into cache group {group_id!r}, which is {kinds[group_id]}")
        declared = fields_for_layer(layer_id, group_id, occurrences.get(group_id, 0))
        fields.setdefault(group_id, []).extend(declared)
        if declared:
            occurrences[group_id] = occurrences.get(group_id, 0) + 1
    groups = []
    for group_id, (family, retention, window) in kinds.items():
        if not fields[group_id]:
            raise ValueError(f"no layer of cache group {group_id!r} declares a field")
        history = family == "history"
        policy: TransferPolicy = "full_suffix" if history else "latest_snapshot"
        spec = CacheGroupSpec(
            group_id,
            family,
            retention,
            replayable=False,
            rows_per_page=prefix_granularity if history else None,
            entry_stride_tokens=1 if history else None,
            checkpoint_granularity=None if history else checkpoint_granularity or prefix_granularity,
            sliding_window_tokens=window,
            transfer_policy=policy if with_transfer_policy else None,
        )
        groups.append((spec, tuple(fields[group_id])))
    return tuple(groups)
