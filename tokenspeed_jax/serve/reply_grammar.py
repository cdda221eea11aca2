"""Grammars of whole replies, in llguidance's dialect of Lark: reasoning in front of calls or of a constrained content.

A grammar is a list of rules. Markers that are one added token are written as that token's id, for to llguidance no text
can spell it; all others as text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.serve.bare_values import bare_parameters
from tokenspeed_jax.serve.protocol.json_schemas import JSON_SPACE, with_guidance
from tokenspeed_jax.text.transcripts import END_THINK, THINK, CallSyntax, ChannelSyntax, ParameterSyntax

type Rules = list[str]
type Schemas = Mapping[str, Mapping[str, Any]]
"""The functions that may be called, with the schemas of their arguments as `tools.call_schemas` makes them."""

_ANY_TEXT = "/(?s:.*)/"
_NO_OBJECT = "/(?s:[^{].*)?/"
_MARKER = re.compile(r"<[^<>\s]+>")
_LINE_ENDS = r"/\n{0,2}/"
"""What models put between reasoning and reply; it is not part of either."""


class ReplyGrammar:
    """Writes grammars for one tokenizer and one format.

    Args:
        marker_ids: the markers that are added tokens, with their ids.
        channels: how content is headed, in a format with channels.
    """

    def __init__(self, marker_ids: Mapping[str, int], channels: ChannelSyntax | None) -> None:
        self._marker_ids = marker_ids
        self._channels = channels

    def content(self, constraint: StructuredOutputsParams) -> Rules:
        """`body` is a content that the constraint allows. Raises `InvalidRequest` without llguidance."""
        return [f"body: {self._headed_content()}", *_content_rules(constraint)]

    def forced_calls(self, syntax: CallSyntax, schemas: Schemas, *, allows_parallel: bool) -> Rules:
        """`body` is one call, or several."""
        return ["body: calls", *self._calls(syntax, schemas, allows_parallel=allows_parallel)]

    def calls_or_content(
        self, syntax: CallSyntax, schemas: Schemas, constraint: StructuredOutputsParams | None, *, allows_parallel: bool
    ) -> Rules:
        """`body` is either calls or a content; where that is free, it may stand in front of the calls.

        Only calls that begin with a marker can be told from a constrained content: see `begins_with_marker`.
        """
        if constraint is not None:
            content = _content_rules(constraint)
        elif self._channels is not None or begins_with_marker(syntax):
            content = [f"content: {_ANY_TEXT}"]
        else:
            content = [f"content: {_NO_OBJECT}"]
        if constraint is None and self._channels is None and (marker := _first_marker(syntax)) is not None:
            return self._calls_in_text(syntax, schemas, marker, allows_parallel=allows_parallel)
        calls = self._calls(syntax, schemas, allows_parallel=allows_parallel)
        return [f"body: calls | {self._headed_content()}", *content, *calls]

    def behind_optional_reasoning(self, body: Rules) -> Rules:
        """The whole reply, which may begin with reasoning."""
        return [
            "start: reasoning? body",
            f"reasoning: {self._text(THINK)} thought {_LINE_ENDS}",
            *self._until("thought", END_THINK),
            *body,
        ]

    def behind_asides(self, body: Rules, *, allows_preamble: bool) -> Rules:
        """The whole reply of a format with channels, whose last message is the body.

        Args:
            allows_preamble: whether there may be text for the reader in front of it, which becomes content too.
        """
        assert self._channels is not None
        headers = [self._text(self._channels.reasoning_header)]
        headers += [self._text(self._channels.preamble_header)] if allows_preamble else []
        return [
            "start: aside* body",
            f"aside: ({' | '.join(headers)}) aside_text {self._text(self._channels.next_message)}",
            *self._until("aside_text", self._channels.aside_end),
            *body,
        ]

    def _headed_content(self) -> str:
        return "content" if self._channels is None else f"{self._text(self._channels.content_header)} content"

    def _calls(self, syntax: CallSyntax, schemas: Schemas, *, allows_parallel: bool) -> Rules:
        more = f" ({self._text(syntax.separator)} call)*" if allows_parallel and not syntax.is_single else ""
        calls = f"{self._text(syntax.begin)} call{more} {self._text(syntax.end)}"
        return [f"calls: {calls.strip()}", *self._call_rules(syntax, syntax.call_begin, schemas)]

    def _calls_in_text(self, syntax: CallSyntax, schemas: Schemas, marker: str, *, allows_parallel: bool) -> Rules:
        """`body` is text, with calls wherever the marker stands in it."""
        begin, call_begin = syntax.begin.removeprefix(marker), syntax.call_begin
        if not syntax.begin:
            call_begin = call_begin.removeprefix(marker)
        more = f" ({self._text(syntax.separator)} call)*" if allows_parallel and syntax.begin else ""
        calls = f"calls: lead {self._text(begin)} call{more} {self._text(syntax.end)}"
        return [
            f"body: calls{'*' if allows_parallel else '?'} {_ANY_TEXT}",
            calls.strip(),
            *self._until("lead", marker),
            *self._call_rules(syntax, call_begin, schemas),
        ]

    def _call_rules(self, syntax: CallSyntax, call_begin: str, schemas: Schemas) -> Rules:
        rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(schemas)))]
        for index, (name, schema) in enumerate(schemas.items()):
            head = self._text(call_begin + name)
            number = "" if syntax.number is None else f" /{syntax.number}/"
            rule = f"call_{index}: {head}{number} {self._text(syntax.name_end)}"
            if syntax.parameter is None:
                rules.append(f"{rule} %json {json.dumps(schema)} {self._text(syntax.call_end)}".strip())
            else:
                arguments, more = self._bare_arguments(f"call_{index}", syntax, syntax.parameter, schema)
                rules += [f"{rule} {arguments}", *more]
        return rules + ([] if syntax.parameter is None else self._bare_text(syntax, syntax.parameter))

    def _bare_arguments(
        self, call: str, syntax: CallSyntax, form: ParameterSyntax, schema: Mapping[str, Any]
    ) -> tuple[str, Rules]:
        """What follows the name of a call whose values are bare, with its end: any text, for want of a description."""
        parameters = bare_parameters(schema)
        if parameters is None:
            return "rest_of_call", []
        names: list[str] = []
        rules: Rules = []
        for index, parameter in enumerate(parameters):
            names.append(f"{call}_{index}" if parameter.is_required else f"{call}_{index}?")
            if parameter.schema is not None:
                value = f"%json {json.dumps(parameter.schema)} {self._text(form.end)}"
            elif parameter.choices is not None:
                value = f"({' | '.join(map(_literal, parameter.choices))}) {self._text(form.end)}"
            else:
                value = "bare_value"
            rules.append(f"{call}_{index}: {self._text(form.begin + parameter.key + form.key_end)} {value}")
        return f"{' '.join(names)} {self._text(syntax.call_end)}", rules

    def _bare_text(self, syntax: CallSyntax, form: ParameterSyntax) -> Rules:
        """`bare_value` is any text that the parser reads as one value, with its end; `rest_of_call` ends a call."""
        ends = "|".join(re.escape(end).replace("/", r"\/") for end in form.value_ends)
        rules = [f"BARE_TEXT: {_ANY_TEXT} & ~/(?s:.*)({ends})(?s:.*)/"]
        if form.value_ends[0] in self._marker_ids:
            rules.append(f"bare_value: BARE_TEXT {self._text(form.end.lstrip())}")
        else:
            # One terminal: two would leave the first to take what it can of the second.
            rules += ["bare_value: BARE_VALUE", f"BARE_VALUE: BARE_TEXT {_literal(form.end)}"]
        marker = _MARKER.match(syntax.call_end)
        assert marker is not None
        behind = self._text(syntax.call_end.removeprefix(marker[0]))
        return [*rules, f"rest_of_call: call_text {behind}".strip(), *self._until("call_text", marker[0])]

    def _until(self, rule: str, marker: str) -> Rules:
        """`rule` is any text up to and with the first `marker`."""
        is_lazy = "" if marker in self._marker_ids else "[lazy]"
        return [f"{rule}{is_lazy}: {_ANY_TEXT} {self._text(marker)}"]

    def _text(self, text: str) -> str:
        """Fixed text as a sequence of literals and tokens; nothing for no text."""
        parts: list[str] = []
        literal = ""
        for piece in _pieces(text):
            if piece in self._marker_ids:
                parts += [_literal(literal)] if literal else []
                parts.append(f"<[{self._marker_ids[piece]}]>")
                literal = ""
            else:
                literal += piece
        parts += [_literal(literal)] if literal else []
        return " ".join(parts)


def begins_with_marker(syntax: CallSyntax) -> bool:
    """Whether a call can be told from any other text by its first characters."""
    return _first_marker(syntax) is not None


def behind_line_ends(body: Rules) -> Rules:
    """The whole of what follows reasoning that the prompt has begun."""
    return [f"start: {_LINE_ENDS} body", *body]


def from_the_start(body: Rules) -> Rules:
    """The whole reply, where it has no reasoning."""
    return ["start: body", *body]


def grammar_text(rules: Rules) -> str:
    """The rules as one text."""
    return "\n".join(rules) + "\n"


def _content_rules(constraint: StructuredOutputsParams) -> Rules:
    """`content` is what the constraint allows."""
    if constraint.json is not None or constraint.json_object:
        schema: Any = json.loads(str(constraint.json)) if constraint.json is not None else {"type": "object"}
        return [f"content: %json {json.dumps(with_guidance(schema, whitespace_pattern=JSON_SPACE))}"]
    if constraint.choice is not None:
        return ["content: " + " | ".join(map(_literal, constraint.choice))]
    if constraint.regex is not None:
        try:  # here, for a server must start without it
            from llguidance import regex_to_lark
        except ImportError:
            name = "structured_outputs.regex"
            raise InvalidRequest(f"{name} needs llguidance, which is not installed", parameter=name) from None
        return [f"content: /{regex_to_lark(constraint.regex)}/"]
    return [f"content: %lark {{\n{constraint.grammar}\n}}"]


def _first_marker(syntax: CallSyntax) -> str | None:
    found = _MARKER.match(syntax.begin or syntax.call_begin)
    return found[0] if found else None


def _pieces(text: str) -> Sequence[str]:
    """`text` cut at what may be markers."""
    at = 0
    pieces: list[str] = []
    for found in _MARKER.finditer(text):
        pieces += [text[at : found.start()], found[0]]
        at = found.end()
    return [*pieces, text[at:]]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
