"""MiniMax-M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...`."""

from typing import ClassVar

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax, ParameterSyntax
from tokenspeed_jax.text.transcripts.xml_calls import ToolSchemas, XmlParser, XmlTags

_TAGS = XmlTags(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    call_prefix='<invoke name="',
    call_suffix='">',
    call_close="</invoke>",
    parameter_prefix='<parameter name="',
    parameter_suffix='">',
    parameter_close="</parameter>",
)


class MiniMaxM2Parser(XmlParser):
    """See the file's docstring. One block holds all calls of a turn."""

    markers: ClassVar[tuple[str, ...]] = _TAGS.all
    syntax: ClassVar[CallSyntax] = CallSyntax(
        begin=f"{_TAGS.open}\n",
        call_begin=_TAGS.call_prefix,
        name_end=f"{_TAGS.call_suffix}\n",
        call_end=f"{_TAGS.call_close}\n",
        end=_TAGS.close,
        parameter=ParameterSyntax(
            begin=_TAGS.parameter_prefix,
            key_end=_TAGS.parameter_suffix,
            end=f"{_TAGS.parameter_close}\n",
            value_ends=(_TAGS.parameter_close, _TAGS.parameter_prefix, _TAGS.call_close),
        ),
    )

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(_TAGS, tools)
