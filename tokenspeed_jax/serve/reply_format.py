"""What the server was told about the model's replies, applied to one request."""

import dataclasses
from collections.abc import Sequence

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.tools import Tool, schemas_of
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.text.transcripts import TranscriptFormat, TranscriptParser

_PROMPT_END_TOKENS = 32


class ReplyFormat:
    """The configured parsers and the tokenizer whose tokens they read."""

    def __init__(self, config: ServerConfig, tokenizer: ServedTokenizer) -> None:
        self._format = TranscriptFormat(config.reasoning_parser, config.tool_call_parser)
        self._tokenizer = tokenizer
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

    def applied(self, params: SamplingParams, tools: Sequence[Tool]) -> SamplingParams:
        """The parameters with which the reply's text has all that its parser has to see.

        Raises:
            ApiError: 400 for tools whose calls nobody would recognise.
        """
        if tools and self._format.tool_calls is None:
            raise ApiError(
                "tools: this server does not recognise tool calls; start it with --enable-auto-tool-choice and "
                '--tool-call-parser, or send tool_choice = "none"',
                param="tools",
                code="unsupported_parameter",
            )
        if self._needs_special_tokens[bool(tools)]:
            return dataclasses.replace(params, skip_special_tokens=False)
        return params

    def parser(
        self, tools: Sequence[Tool], prompt_token_ids: Sequence[int], continued: str | None
    ) -> TranscriptParser | None:
        """A fresh parser for one reply; None when all of it is content.

        Args:
            continued: text of the message that the reply continues, None when it begins one.
        """
        end = self._tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        is_open = self._format.reasoning_is_open(end, continued)
        return self._format.parser(schemas_of(tools) if tools else None, reasoning_is_open=is_open)
