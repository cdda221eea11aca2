"""The scheduler core, as the engine and other callers import it.

The extension `tokenspeed_jax._scheduler` is the C++ of `scheduler_cpp/`; signatures are in `_scheduler.pyi`. Token
counts, block ids and parent counts are plain integers; block tables are int32.
"""

from tokenspeed_jax._scheduler import (
    PD,
    Cache,
    CacheGroupConfig,
    CacheGroupFamily,
    CacheRetention,
    CacheTransferPolicy,
    CapacityModel,
    ExecutionEvent,
    ExecutionPlan,
    Forward,
    ForwardEvent,
    KVEvent,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
)

__all__ = [
    "PD",
    "Cache",
    "CacheGroupConfig",
    "CacheGroupFamily",
    "CacheRetention",
    "CacheTransferPolicy",
    "CapacityModel",
    "ExecutionEvent",
    "ExecutionPlan",
    "Forward",
    "ForwardEvent",
    "KVEvent",
    "RequestSpec",
    "Scheduler",
    "SchedulerConfig",
]
