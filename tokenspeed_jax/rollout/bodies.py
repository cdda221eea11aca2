"""What the routes for trainers take; fields have our names, vLLM's or SGLang's, as the routes do."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from tokenspeed_jax.serve.bodies import Neutral
from tokenspeed_jax.serve.protocol.sampling import equals

UpdateMode = Literal["drain", "abort", "keep"]
PauseMode = Literal["keep", "drain", "abort", "wait"]
"""`wait` is vLLM's word for `drain`."""
MemoryTag = Literal["kv_cache", "weights"]


class _Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Nothing that is not named is taken."""


class UpdateWeights(_Fields):
    """The body of `/update_weights`.

    Attributes:
        path: a folder of safetensors files that the server can read, with Hugging Face's names.
        version: of these weights; higher than the one that is served.
        mode: what becomes of requests that run, see `Engine.update_weights`.
        check_finite: refuse weights with values that are not finite.
    """

    path: str
    version: int
    mode: UpdateMode = "drain"
    check_finite: bool = False


class UpdateWeightsFromDisk(_Fields):
    """The body of SGLang's `/update_weights_from_disk`.

    Attributes:
        weight_version: a number, also as text; one more than the present version unless it is given.
    """

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "flush_cache": equals(True),
        "load_format": equals("auto", "safetensors"),
    }

    model_path: str
    weight_version: int | str | None = None
    abort_all_requests: bool = False


class Pause(_Fields):
    """The body of `/pause`, see `Engine.pause`."""

    mode: PauseMode = "keep"


class PauseGeneration(_Fields):
    """The body of SGLang's `/pause_generation`. Its `retract` is not served: what is paused keeps its cache."""

    mode: Literal["abort", "in_place"] = "abort"


class Sleep(_Fields):
    """The body of `/sleep`, see `Engine.sleep`."""

    level: Literal[1, 2] = 1


class MemoryOccupation(_Fields):
    """The body of SGLang's `/release_memory_occupation` and `/resume_memory_occupation`; null names everything."""

    tags: list[MemoryTag] | None = None
