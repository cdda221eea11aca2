"""`CacheRecipe`: the one place that knows the order layers -> group -> pack -> bind -> capacity (cache-runtime.md 8).

A family overrides seams, never the order. Recipes run before any device array exists and never ask what hardware
there is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.recipes.layout import CacheLayout, CacheMemoryPlan
from tokenspeed_jax.recipes.plan import pack
from tokenspeed_jax.recipes.spec import CacheGroupSpec, Group, require_positive_int

Role = Literal["Fused", "P", "D"]


@dataclass(frozen=True)
class SchedulerLimits:
    """The numbers that bound what the scheduler may hold at once.

    Attributes:
        role: Fused, P (prefill worker) or D (decode worker).
        max_live_requests: rows of a batch and request slots.
        max_scheduled_tokens: token budget of a round, and the longest prefill chunk.
        max_context_len: longest prompt plus output, tokens.
        decode_input_tokens: tokens a decode step feeds per request.
        overlap_schedule_depth: decode steps planned ahead of the landed one, 0 or 1.
        disable_prefix_cache: new prompts never look for a cached prefix.
    """

    role: Role
    max_live_requests: int
    max_scheduled_tokens: int
    max_context_len: int
    decode_input_tokens: int = 1
    overlap_schedule_depth: int = 0
    disable_prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.role not in ("Fused", "P", "D"):
            raise ValueError(f"role must be Fused, P or D, got {self.role!r}")
        for name in ("max_live_requests", "max_scheduled_tokens", "max_context_len", "decode_input_tokens"):
            require_positive_int(name, getattr(self, name))
        if isinstance(self.overlap_schedule_depth, bool) or self.overlap_schedule_depth not in (0, 1):
            raise ValueError(f"overlap_schedule_depth must be 0 or 1, got {self.overlap_schedule_depth!r}")

    @property
    def overlap_tokens(self) -> int:
        """Tokens past the context limit that a block table may cover: the decode reserve and the steps in flight."""
        return (self.overlap_schedule_depth + 1) * self.decode_input_tokens


@dataclass(frozen=True)
class CachePoolSpec:
    """A recipe's output: the plan, what its groups are, and what each layer is."""

    family: str
    memory_plan: CacheMemoryPlan
    layer_types: tuple[str, ...]
    cache_group_specs: tuple[CacheGroupSpec, ...]
    token_capacity: int
    layer_kv_head_counts: tuple[int, ...]
    pool_options: Mapping[str, Any]

    def layer_view(self, first: int, count: int, family: str) -> "CachePoolSpec":
        """The same pool for `count` layers from `first`; only the per-layer members narrow."""
        if first < 0 or count <= 0 or first + count > len(self.layer_types):
            raise ValueError(f"layers [{first}, {first + count}) are outside the {len(self.layer_types)} of the pool")
        window = slice(first, first + count)
        return replace(
            self,
            family=family,
            layer_types=self.layer_types[window],
            layer_kv_head_counts=self.layer_kv_head_counts[window],
        )


@dataclass(frozen=True)
class CacheSetup:
    """A pool specification and the sizes it was made from."""

    spec: CachePoolSpec
    num_draft_layers: int
    cache_budget_bytes: int
    fixed_workspace_bytes: int
    uses_paged_state_verify: bool

    @property
    def num_target_layers(self) -> int:
        return len(self.spec.layer_types) - self.num_draft_layers

    @property
    def plan(self) -> CacheMemoryPlan:
        return self.spec.memory_plan

    @property
    def specs(self) -> tuple[CacheGroupSpec, ...]:
        return self.spec.cache_group_specs

    @property
    def token_capacity(self) -> int:
        return self.spec.token_capacity


class CacheRecipe(ABC):
    """Template of one cache family. `setup()` is final; everything else is a seam.

    Args:
        budget_bytes: bytes for the arena and the workspace beside it.
        token_limit: cap on the reported token capacity; None for none.
        limits: what the scheduler may hold at once.
    """

    family: str
    alignment = 1
    max_padding_fraction = 0.25
    num_draft_layers = 0
    uses_paged_state_verify = False

    def __init__(self, *, budget_bytes: int, token_limit: int | None, limits: SchedulerLimits) -> None:
        self.budget_bytes = require_positive_int("budget_bytes", budget_bytes)
        self.token_limit = None if token_limit is None else require_positive_int("token_limit", token_limit)
        self.limits = limits

    @property
    @abstractmethod
    def prefix_granularity(self) -> int: ...

    @property
    @abstractmethod
    def layer_types(self) -> tuple[str, ...]:
        """Storage label of each layer, target layers before draft layers."""

    @property
    @abstractmethod
    def layer_kv_head_counts(self) -> tuple[int, ...]: ...

    @abstractmethod
    def groups(self) -> tuple[Group, ...]: ...

    def packing(self, groups: Sequence[Group]) -> Mapping[str, int] | None:
        """Packings to pin; None derives them."""
        del groups
        return None

    def check_layout(self, layout: CacheLayout) -> None:
        """Raises if the packed layout breaks a promise the family's kernels rely on."""
        del layout

    @property
    def workspace_bytes(self) -> int:
        """Bytes allocated beside the arena, reserved before the arena is sized."""
        return 0

    @property
    def pool_options(self) -> Mapping[str, Any]:
        return {}

    def num_lcm_blocks(self, layout: CacheLayout, specs: Sequence[CacheGroupSpec]) -> int:
        """Usable parents: what the budget holds, capped by the token limit (the flat product of 10.1)."""
        parents = self.budgeted_parents(layout)
        if self.token_limit is None:
            return parents
        per_parent = max_virtual_packing(layout, specs) * layout.prefix_granularity
        capped = min(parents, self.token_limit // per_parent)
        if capped < 1:
            raise ConfigError(
                f"the cache's token limit of {self.token_limit} tokens is below one parent of {per_parent} tokens"
            )
        return capped

    def budgeted_parents(self, layout: CacheLayout) -> int:
        """Usable parents that the budget pays for; the null parent is paid too."""
        usable = self.budget_bytes - self.workspace_bytes
        parents = usable // layout.lcm_block_bytes - 1
        if parents < 1:
            needed = 2 * layout.lcm_block_bytes + self.workspace_bytes
            raise ConfigError(
                f"the cache needs at least 2 parents of {layout.lcm_block_bytes} bytes (one of them the null parent) "
                f"and {self.workspace_bytes} bytes of workspace, but its budget is {self.budget_bytes} bytes: raise "
                f"kv_cache_memory_bytes to at least {needed}, or lower prefix_granularity",
                field="kv_cache_memory_bytes",
            )
        return parents

    def token_capacity(self, layout: CacheLayout, specs: Sequence[CacheGroupSpec], num_lcm_blocks: int) -> int:
        """Tokens the pool reports: parents times the largest packing times P, floored to the token limit."""
        capacity = num_lcm_blocks * max_virtual_packing(layout, specs) * layout.prefix_granularity
        if self.token_limit is None:
            return capacity
        return min(capacity, self.token_limit // layout.prefix_granularity * layout.prefix_granularity)

    def parents_needed(self, layout: CacheLayout, specs: Sequence[CacheGroupSpec], tokens: int) -> int:
        """Parents for `tokens` of live history under the limits, as the scheduler's own capacity model counts them."""
        model = self.capacity_model(layout, specs)
        return model.lcm_blocks_needed_for(model.concurrent_group_pages(tokens, self.limits.max_context_len))

    def capacity_from_parents(
        self, layout: CacheLayout, specs: Sequence[CacheGroupSpec], num_lcm_blocks: int, upper: int
    ) -> int:
        """The largest token count in [0, upper] whose `parents_needed` is at most `num_lcm_blocks`."""
        low, high = 0, upper
        while low < high:
            middle = (low + high + 1) // 2
            if self.parents_needed(layout, specs, middle) <= num_lcm_blocks:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            raise ConfigError(
                f"{num_lcm_blocks} parents of {layout.lcm_block_bytes} bytes hold no token beside the blocks that "
                f"{self.limits.max_live_requests} live requests need: raise kv_cache_memory_bytes "
                "or lower max_num_seqs",
                field="kv_cache_memory_bytes",
            )
        return low

    def capacity_model(self, layout: CacheLayout, specs: Sequence[CacheGroupSpec]) -> Any:
        """The scheduler's `CapacityModel` for this layout and these limits."""
        from tokenspeed_jax.cache.bridge import capacity_model

        return capacity_model(specs, layout.packing, layout.prefix_granularity, self.limits)

    def check_one_request(self, layout: CacheLayout, specs: Sequence[CacheGroupSpec], num_lcm_blocks: int) -> None:
        """`ConfigError` unless one request of the longest context runs alone in the arena."""
        model = self.capacity_model(layout, specs)
        longest = self.limits.max_context_len
        needed = model.lcm_blocks_needed_for(model.single_request_group_pages(longest))
        if needed <= num_lcm_blocks:
            return
        fits = model.max_single_request_tokens(num_lcm_blocks)
        budget = (needed + 1) * layout.lcm_block_bytes + self.workspace_bytes
        raise ConfigError(
            f"one request of max_model_len {longest} tokens needs {needed} parents of {layout.lcm_block_bytes} bytes, "
            f"but the budget of {self.budget_bytes} bytes holds {num_lcm_blocks} beside the null parent: raise "
            f"kv_cache_memory_bytes to at least {budget}, or lower max_model_len to at most {fits}",
            field="max_model_len",
            limit=fits,
        )

    def setup(self) -> CacheSetup:
        """Runs the stages in order. Nothing is allocated.

        Raises:
            ConfigError: the budget is too small; names the limiting number and what to change.
            ValueError: the family declared something `group` or `pack` refuses.
        """
        groups = self.groups()
        specs = tuple(spec for spec, _ in groups)
        layout = pack(groups, self.prefix_granularity, self.packing(groups), self.alignment, self.max_padding_fraction)
        self.check_layout(layout)
        num_lcm_blocks = self.num_lcm_blocks(layout, specs)
        self.check_one_request(layout, specs, num_lcm_blocks)
        spec = CachePoolSpec(
            family=self.family,
            memory_plan=layout.bind(num_lcm_blocks),
            layer_types=self.layer_types,
            cache_group_specs=specs,
            token_capacity=self.token_capacity(layout, specs, num_lcm_blocks),
            layer_kv_head_counts=self.layer_kv_head_counts,
            pool_options=MappingProxyType(dict(self.pool_options)),
        )
        return CacheSetup(
            spec, self.num_draft_layers, self.budget_bytes, self.workspace_bytes, self.uses_paged_state_verify
        )


def max_virtual_packing(layout: CacheLayout, specs: Sequence[CacheGroupSpec]) -> int:
    """The largest `packing * shard_count` of the groups."""
    return max(layout.packing[spec.group_id] * spec.shard_count for spec in specs)


NO_PADDING_LIMIT = math.inf
