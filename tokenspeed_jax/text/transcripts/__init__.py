"""What a model writes, taken apart while it is written: content, reasoning and tool calls."""

from tokenspeed_jax.text.transcripts.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    TranscriptParser,
)
from tokenspeed_jax.text.transcripts.formats import ReasoningFormat, ToolCallFormat, TranscriptFormat

__all__ = [
    "Arguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "Event",
    "Reasoning",
    "ReasoningFormat",
    "ToolCallFormat",
    "TranscriptFormat",
    "TranscriptParser",
]
