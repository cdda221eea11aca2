"""What a model writes, taken apart while it is written: content, reasoning and tool calls."""

from tokenspeed_jax.text.transcripts.call_syntax import JSON_LIST, CallSyntax, ChannelSyntax, ParameterSyntax
from tokenspeed_jax.text.transcripts.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    TranscriptParser,
)
from tokenspeed_jax.text.transcripts.forced_calls import JsonListParser, NamedCallParser
from tokenspeed_jax.text.transcripts.formats import ReasoningFormat, ToolCallFormat, TranscriptFormat
from tokenspeed_jax.text.transcripts.think import END_THINK, THINK
from tokenspeed_jax.text.transcripts.xml_calls import value_types

__all__ = [
    "END_THINK",
    "JSON_LIST",
    "THINK",
    "Arguments",
    "CallBegun",
    "CallEnded",
    "CallSyntax",
    "ChannelSyntax",
    "Content",
    "Event",
    "JsonListParser",
    "NamedCallParser",
    "ParameterSyntax",
    "Reasoning",
    "ReasoningFormat",
    "ToolCallFormat",
    "TranscriptFormat",
    "TranscriptParser",
    "value_types",
]
