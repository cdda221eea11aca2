"""Everything that a plan says, as plain values that compare and hash alike in every process."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from tokenspeed_jax.scheduler import ExecutionPlan, Scheduler


def content(value: object) -> object:
    """The value itself, or all public attributes of an object of the extension."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return [(name, content(item)) for name, item in value.items()]
    if isinstance(value, Sequence):
        return [content(item) for item in value]
    names = [name for name in dir(value) if not name.startswith("_")]
    fields = {name: getattr(value, name) for name in names}
    # Methods are the views of lists that are attributes too; those without arguments are called.
    return [(name, content(field() if callable(field) else field)) for name, field in sorted(fields.items())]


def digest(plan: ExecutionPlan) -> str:
    return hashlib.sha256(repr(content(plan)).encode()).hexdigest()


def gauges(scheduler: Scheduler, groups: Sequence[str], request_ids: Sequence[str]) -> list[tuple[str, object]]:
    """All that can be asked of a scheduler without changing it."""
    taking_nothing = [
        "waiting_size",
        "prefilling_size",
        "decoding_size",
        "bootstrapping_size",
        "remote_prefilling_size",
        "pd_transfer_size",
        "num_retractions",
        "num_checkpoint_lost_tokens",
        "dropped_kv_events",
        "empty_lcm_blocks",
        "active_lcm_blocks",
        "available_lcm_blocks",
        "host_cached_blocks",
        "host_pinned_blocks",
        "max_single_request_tokens",
        "can_clear_cache",
        "waiting_prefix_hashes",
    ]
    seen: list[tuple[str, object]] = [(name, getattr(scheduler, name)()) for name in taking_nothing]
    seen.append(("lcm_block_uses", scheduler.lcm_block_uses().tolist()))
    seen += [(group, scheduler.cache_group_available_pages(group)) for group in groups]
    seen += [(group, scheduler.cache_group_total_pages(group)) for group in groups]
    seen += [(group, scheduler.cache_group_hit_tokens(group)) for group in groups]
    seen += [(request_id, scheduler.request_token_size(request_id)) for request_id in request_ids]
    return seen + [(request_id, scheduler.pd_transfer_pinned(request_id)) for request_id in request_ids]
