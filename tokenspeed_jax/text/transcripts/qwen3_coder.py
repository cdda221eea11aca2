"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from typing import ClassVar

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

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(_TAGS, tools)
