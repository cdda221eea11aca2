"""Scheduler events to publish, from a scheduler that ran one prompt."""

from collections.abc import Sequence

from tokenspeed_jax.kv_events.feed import EventBatch
from tokenspeed_jax.recipes.spec import CacheGroupSpec

from ..scheduler.scenario import FULL, Scenario

FULL_GROUP = CacheGroupSpec("layers", "history", "full_history", False, rows_per_page=2, entry_stride_tokens=1)


def run(s: Scenario, name: str, prompt: Sequence[int], salt: str = "") -> int:
    """One request from its start to its end. Returns how much of its prompt was cached."""
    s.submit(name, prompt, cache_salt=salt)
    prefix, end = None, 0
    while end < len(prompt):
        step = s.plan()
        prefix = step.prefixes[0] if prefix is None else prefix
        end = step.prefixes[0] + step.inputs[0]
        s.land(name, *([7] if end == len(prompt) else []))
    s.finish(name)
    s.plan()
    assert prefix is not None
    return prefix


def announcing(usable: int = 12, **fields: object) -> Scenario:
    """A scheduler with full attention, pages of two tokens, and events."""
    return Scenario([FULL], usable, enable_kv_cache_events=True, **fields)


def batch_of(prompt: Sequence[int], salt: str = "") -> EventBatch:
    """What a first request stores."""
    s = announcing()
    run(s, "a", prompt, salt)
    return EventBatch(1.5, cleared=False, events=s.scheduler.drain_kv_events())
