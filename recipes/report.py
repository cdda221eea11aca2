"""What a plan holds, per group, in the units a person asks about: the start-up memory report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenspeed_jax.recipes.layout import CacheMemoryPlan
from tokenspeed_jax.recipes.spec import CacheGroupSpec, require_positive_int


@dataclass(frozen=True)
class GroupCapacity:
    """Capacity of one cache group if it had the whole arena to itself.

    Attributes:
        unit: what `capacity` counts.
        block_bytes: payload of one block.
        bytes_per_token: payload per token of history; None for a group whose blocks are per request.
        cache_blocks_per_lcm_block: packing.
        padding_bytes_per_lcm_block: bytes of a parent that no block of the group uses.
        capacity: tokens, or requests.
        supported_requests: requests whose retained part fits at once; None for full history, which has no bound.
        dead_bytes: bytes that the most allowed requests can never use; 0 for full history, None when unknown.
        binding_utilization: payload share of a parent bound to the group, in (0, 1].
    """

    group_id: str
    unit: Literal["tokens", "requests"]
    block_bytes: int
    bytes_per_token: float | None
    cache_blocks_per_lcm_block: int
    padding_bytes_per_lcm_block: int
    capacity: int
    supported_requests: int | None
    dead_bytes: int | None
    binding_utilization: float


def capacity_report(
    plan: CacheMemoryPlan,
    specs: Sequence[CacheGroupSpec],
    *,
    max_num_seqs: int | None = None,
    per_request_blocks: Mapping[str, int] | None = None,
) -> tuple[GroupCapacity, ...]:
    """One row per group, in the order of `specs` (cache-runtime.md 6.3).

    Args:
        max_num_seqs: most live requests; None leaves `dead_bytes` of windowed and per-request groups unknown.
        per_request_blocks: blocks one request holds, for groups that are counted in requests.
    """
    per_request = dict(per_request_blocks or {})
    unknown = sorted(set(per_request) - {spec.group_id for spec in specs})
    if unknown:
        raise ValueError(f"per_request_blocks names undeclared cache groups: {', '.join(unknown)}")
    return tuple(_group_capacity(plan, spec, max_num_seqs, per_request.get(spec.group_id)) for spec in specs)


def _group_capacity(
    plan: CacheMemoryPlan, spec: CacheGroupSpec, max_num_seqs: int | None, request_blocks: int | None
) -> GroupCapacity:
    layout = plan.group(spec.group_id)
    block_bytes = plan.block_bytes(spec.group_id)
    packing = layout.cache_blocks_per_lcm_block
    usable = layout.page_count - 1
    granularity = spec.block_granularity
    window = spec.sliding_window_tokens
    if request_blocks is not None:
        require_positive_int(f"per_request_blocks of cache group {spec.group_id!r}", request_blocks)
        capacity = supported = usable // request_blocks
        blocks_needed: int | None = request_blocks
    else:
        capacity = usable * granularity
        supported = None if window is None else capacity // window
        blocks_needed = None if window is None else -(-window // granularity)
    if blocks_needed is None:
        dead: int | None = 0
    elif max_num_seqs is None:
        dead = None
    else:
        dead = max(0, usable - max_num_seqs * blocks_needed) * block_bytes
    return GroupCapacity(
        group_id=spec.group_id,
        unit="tokens" if request_blocks is None else "requests",
        block_bytes=block_bytes,
        bytes_per_token=block_bytes / granularity if request_blocks is None else None,
        cache_blocks_per_lcm_block=packing,
        padding_bytes_per_lcm_block=plan.lcm_block_bytes - packing * block_bytes,
        capacity=capacity,
        supported_requests=supported,
        dead_bytes=dead,
        binding_utilization=packing * block_bytes / plan.lcm_block_bytes,
    )
