"""`CacheRuntimeContract`: what the engine promises the scheduler about its cache. Published by the arena alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from tokenspeed_jax.recipes.layout import INT32_MAX
from tokenspeed_jax.recipes.spec import CacheGroupSpec, require_positive_int


@dataclass(frozen=True)
class CacheRuntimeContract:
    """Groups, their capacity, and P (cache-runtime.md 2.5). Construction checks everything and raises `ValueError`.

    Attributes:
        num_lcm_blocks: usable parents, the null parent not counted.
        token_capacity: tokens the pool reports.
        group_specs: in dense-index order.
        group_page_counts: local block ids of each group, the null id included.
        group_packing: local blocks of each group in a parent.
    """

    prefix_granularity: int
    num_lcm_blocks: int
    token_capacity: int
    group_specs: tuple[CacheGroupSpec, ...]
    group_page_counts: Mapping[str, int]
    group_packing: Mapping[str, int]

    def __post_init__(self) -> None:
        for name in ("prefix_granularity", "num_lcm_blocks", "token_capacity"):
            require_positive_int(name, getattr(self, name))
        if not isinstance(self.group_specs, tuple) or not self.group_specs:
            raise ValueError(f"group_specs must be a non-empty tuple, got {self.group_specs!r}")
        if not all(isinstance(spec, CacheGroupSpec) for spec in self.group_specs):
            raise ValueError("group_specs must hold CacheGroupSpec objects only")
        ids = [spec.group_id for spec in self.group_specs]
        if len(set(ids)) != len(ids):
            raise ValueError(f"cache group ids must be unique, got {ids}")
        for name in ("group_page_counts", "group_packing"):
            values = dict(getattr(self, name))
            if set(values) != set(ids):
                raise ValueError(f"{name} has the keys {sorted(values)}, the groups are {sorted(ids)}")
            object.__setattr__(self, name, MappingProxyType(values))
        for spec in self.group_specs:
            self._check_group(spec)
        most = max(self.virtual_block_counts.values()) - 1
        if most > INT32_MAX:
            raise ValueError(f"{most} virtual blocks exceed int32 ids")
        if self.token_capacity > most * self.prefix_granularity:
            raise ValueError(
                f"token_capacity {self.token_capacity} exceeds the {most * self.prefix_granularity} tokens of the "
                "group with the most blocks"
            )

    def _check_group(self, spec: CacheGroupSpec) -> None:
        pages, packing = self.group_page_counts[spec.group_id], self.group_packing[spec.group_id]
        require_positive_int(f"group_packing of {spec.group_id!r}", packing)
        if pages != self.num_lcm_blocks * packing + 1:
            raise ValueError(
                f"cache group {spec.group_id!r} has {pages} pages, {self.num_lcm_blocks} parents of {packing} blocks "
                f"make {self.num_lcm_blocks * packing + 1} with the null page"
            )
        if self.prefix_granularity % spec.block_granularity:
            raise ValueError(
                f"block_granularity {spec.block_granularity} of cache group {spec.group_id!r} does not divide "
                f"prefix_granularity {self.prefix_granularity}"
            )
        if spec.rows_per_page is not None and pages * spec.rows_per_page - 1 > INT32_MAX:
            raise ValueError(f"{pages} pages of {spec.rows_per_page} rows exceed int32 slots in {spec.group_id!r}")

    @cached_property
    def virtual_block_counts(self) -> Mapping[str, int]:
        """Block ids the scheduler sees per group, the null id included: shards multiply them."""
        return MappingProxyType(
            {
                spec.group_id: 1 + (self.group_page_counts[spec.group_id] - 1) * spec.shard_count
                for spec in self.group_specs
            }
        )

    @cached_property
    def virtual_packing(self) -> Mapping[str, int]:
        """Blocks of a parent as the scheduler counts them."""
        return MappingProxyType(
            {spec.group_id: self.group_packing[spec.group_id] * spec.shard_count for spec in self.group_specs}
        )
