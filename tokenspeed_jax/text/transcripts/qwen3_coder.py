"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from typing import ClassVar

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax, ParameterSyntax
from tokenspeed_jax.text.transcripts.xml_calls import ToolSchemas, XmlParser, XmlTags

_TAGS = XmlTags(
    open="<tool_call>",
    close="</tool_call>",
    call_prefix="<function=",
    call_suffix=">",
    call_close="</function>",
    parameter_prefix="<parameter=",
    parameter_suffix=">",
    parameter_close="</parameter>",
)


class Qwen3CoderParser(XmlParser):
    """See the file's docstring."""

    markers: ClassVar[tuple[str, ...]] = _TAGS.all
    syntax: ClassVar[CallSyntax] = CallSyntax(
        call_begin=f"{_TAGS.open}\n{_TAGS.call_prefix}",
        name_end=f"{_TAGS.call_suffix}\n",
        call_end=f"{_TAGS.call_close}\n{_TAGS.close}",
        separator="\n",
        parameter=ParameterSyntax(
            begin=_TAGS.parameter_prefix,
            key_end=f"{_TAGS.parameter_suffix}\n",
            end=f"\n{_TAGS.parameter_close}\n",
            value_ends=(_TAGS.parameter_close, _TAGS.parameter_prefix, _TAGS.call_close),
        ),
    )

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(_TAGS, tools)
