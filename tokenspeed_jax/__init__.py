"""TokenSpeed-JAX: serve large language models on NVIDIA GPUs, or sample inside a JAX trainer."""

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.engine import Engine
from tokenspeed_jax.engine.outputs import RequestDelta, RequestOutput, Sample
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import (
    CheckpointError,
    ConfigError,
    EngineClosed,
    EngineStateError,
    InvalidRequest,
    ProfilerError,
    WeightUpdateError,
)
from tokenspeed_jax.kv_events import KVEventsConfig

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStateError",
    "InvalidRequest",
    "KVEventsConfig",
    "ProfilerError",
    "RequestDelta",
    "RequestOutput",
    "Sample",
    "SamplingParams",
    "StructuredOutputsParams",
    "WeightUpdateError",
]
__version__ = "0.1.0"
