"""DeepSeek V3 (`function<sep>NAME` and fenced JSON) and V3.1 (`NAME<sep>` and bare JSON)."""

# ruff: noqa: RUF001 - DeepSeek's markers have these bars

import re
from typing import ClassVar

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax
from tokenspeed_jax.text.transcripts.sections import SectionMarkers, SectionParser

_SEPARATOR = "<｜tool▁sep｜>"
_NAMES = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_V3 = SectionMarkers(
    *_NAMES,
    header=re.compile(rf"\s*function{_SEPARATOR}\s*(?P<name>[^\s<]+)\s*(?:```(?:json)?\s*)?"),
    fence="```",
)
_V31 = SectionMarkers(*_NAMES, header=re.compile(rf"\s*(?P<name>[^\s<]+)\s*{_SEPARATOR}\s*"))


class DeepSeekV3Parser(SectionParser):
    """DeepSeek V3 and R1."""

    markers: ClassVar[tuple[str, ...]] = (*_V3.all, _SEPARATOR)
    syntax: ClassVar[CallSyntax] = CallSyntax(
        begin=_V3.section_begin,
        call_begin=f"{_V3.call_begin}function{_SEPARATOR}",
        name_end="\n```json\n",
        call_end=f"\n```{_V3.call_end}",
        separator="\n",
        end=_V3.section_end,
    )

    def __init__(self) -> None:
        super().__init__(_V3)


class DeepSeekV31Parser(SectionParser):
    """DeepSeek V3.1."""

    markers: ClassVar[tuple[str, ...]] = (*_V31.all, _SEPARATOR)
    syntax: ClassVar[CallSyntax] = CallSyntax(
        begin=_V31.section_begin,
        call_begin=_V31.call_begin,
        name_end=_SEPARATOR,
        call_end=_V31.call_end,
        end=_V31.section_end,
    )

    def __init__(self) -> None:
        super().__init__(_V31)
