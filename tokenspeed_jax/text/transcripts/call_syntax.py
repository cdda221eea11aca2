"""How a format writes its calls: the fixed text around names and arguments, from which a grammar can be made."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterSyntax:
    """How a format writes one argument with a bare value: `begin` KEY `key_end` VALUE `end`.

    Attributes:
        value_ends: what no value has in it, since the parser would end it there.
    """

    begin: str
    key_end: str
    end: str
    value_ends: tuple[str, ...]


@dataclass(frozen=True)
class CallSyntax:
    """`begin`, calls with `separator` between them, `end`; a call is `call_begin` NAME `name_end` ARGUMENTS `call_end`.

    What is written this way, the format's parser reads.

    Attributes:
        parameter: how each argument is written, where the arguments are no JSON object.
        number: an expression for what stands between the name and `name_end`, where calls are numbered.
        is_single: a reply has one call at most.
    """

    call_begin: str
    name_end: str
    call_end: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    number: str | None = None
    is_single: bool = False
    parameter: ParameterSyntax | None = None


@dataclass(frozen=True)
class ChannelSyntax:
    """How a format with channels writes what is no call.

    Attributes:
        reasoning_header: begins a message that is reasoning.
        preamble_header: begins a message for the reader that more messages follow.
        aside_end: ends either.
        next_message: stands between them and the header of the next one.
        content_header: begins the message for the reader, the last one.
    """

    reasoning_header: str
    preamble_header: str
    aside_end: str
    next_message: str
    content_header: str


JSON_LIST = CallSyntax(
    begin="[",
    call_begin='{"name": "',
    name_end='", "parameters": ',
    call_end="}",
    separator=", ",
    end="]",
)
"""A list of calls without any markers: what a model that has no format of its own is made to write."""
