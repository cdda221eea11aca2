"""Kimi K2 and Kimi-Linear: a section of calls, each named `functions.NAME:INDEX`."""

import re
from typing import ClassVar

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax
from tokenspeed_jax.text.transcripts.sections import SectionMarkers, SectionParser

KIMI_SECTION_BEGIN = "<|tool_calls_section_begin|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI = SectionMarkers(
    KIMI_SECTION_BEGIN,
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    header=re.compile(rf"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+):[0-9]+)\s*{re.escape(_ARGUMENTS)}\s*"),
)


class KimiParser(SectionParser):
    """See the file's docstring. The ids are the model's own: it was taught to read them in later turns."""

    markers: ClassVar[tuple[str, ...]] = (*_KIMI.all, _ARGUMENTS)
    syntax: ClassVar[CallSyntax] = CallSyntax(
        begin=_KIMI.section_begin,
        call_begin=f"{_KIMI.call_begin}functions.",
        number=":[0-9]{1,3}",
        name_end=_ARGUMENTS,
        call_end=_KIMI.call_end,
        end=_KIMI.section_end,
    )

    def __init__(self) -> None:
        super().__init__(_KIMI)
