"""Where the device's memory goes: the budget before start and the report at start."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.recipes.report import GroupCapacity

CPU_ARENA_BYTES = 1 << 30
"""Arena of an engine on a CPU when no size is given; host memory has no allocator limit to take a share of."""


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes, in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_limit(device: jax.Device) -> int | None:
    """Bytes that JAX may allocate on a device; None where the platform does not say (a CPU)."""
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def bytes_in_use(device: jax.Device) -> int:
    """Bytes that lie on a device: as its allocator counts them, or, on a CPU, of all arrays of this process there."""
    if stats := device.memory_stats():
        return stats["bytes_in_use"]
    arrays = (array for array in jax.live_arrays() if device in array.sharding.device_set)
    shards = (shard.data for array in arrays for shard in array.addressable_shards if shard.device == device)
    # By address: one buffer may be in several arrays.
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def arena_budget(config: EngineConfig, device: jax.Device, *, reserved: dict[str, int]) -> int:
    """Bytes for the cache arena.

    Args:
        reserved: bytes that the engine needs beside the arena, by what for; what already lies on the device (the
            trainer's arrays, or weights that were loaded) is not part of it.

    Raises:
        ConfigError: what is reserved leaves nothing, or a given size does not fit.
    """
    limit = device_limit(device)
    if limit is None:
        return config.kv_cache_memory_bytes or CPU_ARENA_BYTES
    in_use = (device.memory_stats() or {}).get("bytes_in_use", 0)
    return arena_share(config, limit, {"in use": in_use, **reserved})


def arena_share(config: EngineConfig, limit: int, taken: dict[str, int]) -> int:
    """Bytes for the cache arena on a device of which JAX may allocate `limit` bytes.

    Args:
        taken: bytes that the arena cannot have, by what for.

    Raises:
        ConfigError: what is taken leaves nothing, or a given size does not fit.
    """
    parts = ", ".join(f"{name} {in_gib(size)}" for name, size in taken.items())
    if config.kv_cache_memory_bytes is not None:
        left = limit - sum(taken.values())
        if config.kv_cache_memory_bytes > left:
            raise ConfigError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} exceeds the {max(left, 0)} bytes that remain of "
                f"the device's {limit} ({parts}): lower kv_cache_memory_bytes",
                field="kv_cache_memory_bytes",
            )
        return config.kv_cache_memory_bytes
    budget = int(limit * config.gpu_memory_utilization) - sum(taken.values())
    if budget <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of the device's {limit} bytes leaves nothing for "
            f"the cache arena ({parts}): raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs",
            field="gpu_memory_utilization",
        )
    return budget


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one engine at start.

    Attributes:
        weights: the model's parameters.
        arena: the cache arena, null parent included.
        device_state: sampling state of the request slots.
        workspace: the largest step's temporaries.
        free: what the device has left after all of these; None where the platform does not say.
        prefix_granularity: tokens of a prefix page, at whose multiples requests share the cache.
        token_capacity: most tokens that the arena could hold, with the most densely packed cache group alone.
        groups: capacity of each cache group if it had the whole arena.
    """

    weights: int
    arena: int
    device_state: int
    workspace: int
    free: int | None
    num_parents: int
    parent_bytes: int
    prefix_granularity: int
    token_capacity: int
    groups: tuple[GroupCapacity, ...]

    def lines(self) -> Iterable[str]:
        """The report as text."""
        free = "not reported by this platform" if self.free is None else in_gib(self.free)
        yield f"weights       {in_gib(self.weights)}"
        yield f"cache arena   {in_gib(self.arena)} ({self.num_parents} parents of {self.parent_bytes} bytes)"
        yield f"device state  {in_gib(self.device_state)}"
        yield f"workspace     {in_gib(self.workspace)}"
        yield f"free          {free}"
        yield from group_lines(self.groups)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def group_lines(groups: Iterable[GroupCapacity]) -> Iterable[str]:
    """What each cache group takes and holds, as text."""
    for group in groups:
        per_token = "" if group.bytes_per_token is None else f"{group.bytes_per_token:.0f} bytes per token, "
        yield (
            f"group {group.group_id}: {per_token}packing {group.cache_blocks_per_lcm_block}, "
            f"{group.padding_bytes_per_lcm_block} bytes of a parent unused, capacity {group.capacity} {group.unit}"
        )


def in_gib(size: int) -> str:
    """A number of bytes as text."""
    return f"{size / 2**30:.3f} GiB"
