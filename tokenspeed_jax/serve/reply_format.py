"""What the server was told about the model's replies, applied to one request."""

import dataclasses
from collections.abc import Sequence

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.errors import ApiError, refusal
from tokenspeed_jax.serve.protocol.tools import ForcedCall, Tool, schemas_of
from tokenspeed_jax.serve.reply_constraints import CallingRequest, ReplyConstraints
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.text.transcripts import JsonListParser, NamedCallParser, TranscriptFormat, TranscriptParser

_PROMPT_END_TOKENS = 32


class ReplyFormat:
    """The configured parsers and the tokenizer whose tokens they read."""

    def __init__(self, config: ServerConfig, tokenizer: ServedTokenizer) -> None:
        self._format = TranscriptFormat(config.reasoning_parser, config.tool_call_parser)
        self._forced_format = self._format.with_implied_calls
        self._tokenizer = tokenizer
        self._constraints = ReplyConstraints(self._forced_format, tokenizer)
        self._needs_special_tokens = {
            has_tools: any(map(self._is_special, self._format.markers(has_tools=has_tools)))
            for has_tools in (False, True)
        }

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is told from content."""
        return self._format.reasoning is not None

    @property
    def reasoning_switches(self) -> tuple[str, ...]:
        """Variables by which chat templates turn reasoning on or off; gpt-oss's only knows efforts."""
        return () if self._format.reasoning == "openai_gptoss" else ("enable_thinking", "thinking")

    def _is_special(self, marker: str) -> bool:
        return not self._tokenizer.special_ids.isdisjoint(self._tokenizer.encode(marker, False))

    def applied(
        self, params: SamplingParams, tools: Sequence[Tool], forced: ForcedCall | None = None
    ) -> SamplingParams:
        """The parameters with which the reply's text has all that its parser has to see.

        Raises:
            ApiError: 400 for tools whose calls nobody would recognise.
        """
        if tools and self._format.tool_calls is None and forced is None:
            raise ApiError(
                "tools: this server does not recognise tool calls; start it with --enable-auto-tool-choice and "
                '--tool-call-parser, or send tool_choice = "none" or one that forces a call',
                param="tools",
                code="unsupported_parameter",
            )
        if self._needs_special_tokens[bool(tools)]:
            return dataclasses.replace(params, skip_special_tokens=False)
        return params

    def constrained(
        self, params: SamplingParams, request: CallingRequest, prompt_token_ids: Sequence[int]
    ) -> SamplingParams:
        """The parameters with what the request demands of its content and of calls, behind the reasoning.

        Raises:
            ApiError: 400 for a demand that no grammar of this format describes.
        """
        try:
            constraint = self._constraints.constraint(
                params.structured_outputs, request, self._prompt_end(prompt_token_ids)
            )
        except InvalidRequest as error:
            raise refusal(error, request.names) from None
        return dataclasses.replace(params, structured_outputs=constraint)

    def parser(
        self,
        tools: Sequence[Tool],
        prompt_token_ids: Sequence[int],
        continued: str | None,
        forced: ForcedCall | None = None,
    ) -> TranscriptParser | None:
        """A fresh parser for one reply; None when all of it is content.

        Args:
            continued: text of the message that the reply continues, None when it begins one.
            forced: what the reply was made to call.
        """
        is_open = self._format.reasoning_is_open(self._prompt_end(prompt_token_ids), continued)
        reply_format = self._format if forced is None else self._forced_format
        plain: TranscriptParser | None = None
        if forced is not None and self._constraints.forced_syntax(forced) is None:
            plain = NamedCallParser(forced.functions[0].name) if forced.is_named else JsonListParser()
        schemas = schemas_of(tools) if tools else None
        return reply_format.parser(schemas, reasoning_is_open=is_open, plain_calls=plain)

    def _prompt_end(self, prompt_token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
