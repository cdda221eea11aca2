"""What a chat request demands of its reply, as one constraint of the engine: calls, content, reasoning in front."""

from collections.abc import Sequence
from typing import Protocol

from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.serve.bare_values import bare_parameters
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.json_schemas import text_of
from tokenspeed_jax.serve.protocol.tools import ForcedCall, Tool, call_schemas
from tokenspeed_jax.serve.reply_grammar import (
    ReplyGrammar,
    Rules,
    begins_with_marker,
    behind_line_ends,
    from_the_start,
    grammar_text,
)
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.text.transcripts import END_THINK, JSON_LIST, CallSyntax, TranscriptFormat


class CallingRequest(Protocol):
    """What of a chat request decides how its reply is constrained."""

    @property
    def offered_tools(self) -> Sequence[Tool]: ...

    @property
    def forced_call(self) -> ForcedCall | None: ...

    @property
    def continued(self) -> str | None: ...

    @property
    def allows_parallel(self) -> bool: ...

    @property
    def names(self) -> dict[str, str]: ...


class ReplyConstraints:
    """Makes constraints for one model's format and tokenizer.

    A forced call is written in the model's own format where a grammar can describe it, for that is what the model was
    taught; else as plain JSON, a list of calls or the named function's arguments alone.
    """

    def __init__(self, reply_format: TranscriptFormat, tokenizer: ServedTokenizer) -> None:
        self._format = reply_format
        ids = {marker: tokenizer.added_id(marker) for marker in reply_format.markers(has_tools=True)}
        self._grammar = ReplyGrammar(
            {marker: token for marker, token in ids.items() if token is not None}, reply_format.channel_syntax
        )

    def constraint(
        self, content: StructuredOutputsParams | None, request: CallingRequest, prompt_end: str
    ) -> StructuredOutputsParams | None:
        """The constraint of the whole reply, None for none.

        Args:
            content: what the request demands of the content.
            prompt_end: the last words of the prompt.

        Raises:
            ApiError: 400 for tools, or tools with a content, that no grammar of this format describes.
            InvalidRequest: the grammar is too large.
        """
        body = self._body(content, request)
        if body is None:
            return None
        expected = self._format.expected_reasoning(prompt_end, request.continued)
        if isinstance(body, StructuredOutputsParams):
            if expected == "absent":
                return body
            body = self._grammar.content(body)
        match expected:
            case "absent":
                rules = from_the_start(body)
            case "open":
                return StructuredOutputsParams(grammar=grammar_text(behind_line_ends(body)), begins_after=END_THINK)
            case "optional":
                rules = self._grammar.behind_optional_reasoning(body)
            case "channels":
                is_free = content is None and request.forced_call is None
                rules = self._grammar.behind_asides(body, allows_preamble=is_free)
        return StructuredOutputsParams(grammar=grammar_text(rules))

    def forced_syntax(self, forced: ForcedCall) -> CallSyntax | None:
        """The model's own format, None where forced calls are plain JSON."""
        syntax = self._format.call_syntax
        if syntax is not None and syntax.parameter is not None:
            return syntax if all(bare_parameters(schema) is not None for schema in forced.schemas().values()) else None
        return syntax

    def _body(
        self, content: StructuredOutputsParams | None, request: CallingRequest
    ) -> StructuredOutputsParams | Rules | None:
        """What follows the reasoning: a constraint that is one as it stands, or rules."""
        forced, tools = request.forced_call, request.offered_tools
        if forced is not None:
            syntax, schemas = self.forced_syntax(forced), forced.schemas()
            if syntax is None and forced.is_named:
                (schema,) = schemas.values()
                return StructuredOutputsParams(json=text_of(schema))
            allows_parallel = request.allows_parallel and not forced.is_named
            return self._grammar.forced_calls(syntax or JSON_LIST, schemas, allows_parallel=allows_parallel)
        strict = [tool.function for tool in tools if tool.function.strict]
        if not tools or (content is None and not strict):
            return content
        syntax = self._format.call_syntax
        assert syntax is not None  # else tools that are not forced are refused before
        schemas = call_schemas([tool.function for tool in tools])
        if content is not None and not begins_with_marker(syntax) and self._format.channel_syntax is None:
            raise _undescribed("a constrained content beside tools")
        if syntax.parameter is not None:
            for function in strict:
                if bare_parameters(schemas[function.name]) is None:
                    raise _undescribed(f"{function.name!r}, whose strict schema bare values cannot follow,")
        return self._grammar.calls_or_content(syntax, schemas, content, allows_parallel=request.allows_parallel)


def _undescribed(what: str) -> ApiError:
    """400 for calls that the model may or may not make, in a format that leaves no way to constrain that."""
    return ApiError(
        f'tools: with the format of this server\'s --tool-call-parser, {what} needs tool_choice "required", a function '
        'by name, or "none"',
        param="tools",
        code="unsupported_parameter",
    )
