"""The formats by the names that vLLM gives them, and what combinations of them make sense."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax, ChannelSyntax
from tokenspeed_jax.text.transcripts.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from tokenspeed_jax.text.transcripts.events import TranscriptParser
from tokenspeed_jax.text.transcripts.harmony import HarmonyParser
from tokenspeed_jax.text.transcripts.hermes import HermesParser
from tokenspeed_jax.text.transcripts.kimi import KIMI_SECTION_BEGIN, KimiParser
from tokenspeed_jax.text.transcripts.llama3 import Llama3Parser
from tokenspeed_jax.text.transcripts.minimax import MiniMaxM2Parser
from tokenspeed_jax.text.transcripts.qwen3_coder import Qwen3CoderParser
from tokenspeed_jax.text.transcripts.think import END_THINK, THINK, ThinkParser
from tokenspeed_jax.text.transcripts.xml_calls import ToolSchemas

ToolCallFormat = Literal[
    "deepseek_v3",
    "deepseek_v31",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "minimax_m2",
    "openai",
    "qwen3_coder",
    "qwen3_xml",
]
ReasoningFormat = Literal["deepseek_r1", "deepseek_v3", "kimi_k2", "minimax_m2", "openai_gptoss", "qwen3"]

ExpectedReasoning = Literal["absent", "open", "optional", "channels"]
"""Where a reply has reasoning: nowhere, from its first token on, maybe at its beginning, in channels of its own."""

_HARMONY: tuple[ToolCallFormat, ReasoningFormat] = ("openai", "openai_gptoss")
_SYNTAXES: Mapping[ToolCallFormat, CallSyntax] = {
    "deepseek_v3": DeepSeekV3Parser.syntax,
    "deepseek_v31": DeepSeekV31Parser.syntax,
    "hermes": HermesParser.syntax,
    "kimi_k2": KimiParser.syntax,
    "llama3_json": Llama3Parser.syntax,
    "minimax_m2": MiniMaxM2Parser.syntax,
    "openai": HarmonyParser.syntax,
    "qwen3_coder": Qwen3CoderParser.syntax,
    "qwen3_xml": Qwen3CoderParser.syntax,
}

_CALLS: Mapping[ToolCallFormat, tuple[Callable[[ToolSchemas], TranscriptParser], tuple[str, ...]]] = {
    "deepseek_v3": (lambda _tools: DeepSeekV3Parser(), DeepSeekV3Parser.markers),
    "deepseek_v31": (lambda _tools: DeepSeekV31Parser(), DeepSeekV31Parser.markers),
    "hermes": (lambda _tools: HermesParser(), HermesParser.markers),
    "kimi_k2": (lambda _tools: KimiParser(), KimiParser.markers),
    "llama3_json": (lambda _tools: Llama3Parser(), Llama3Parser.markers),
    "minimax_m2": (MiniMaxM2Parser, MiniMaxM2Parser.markers),
    "openai": (lambda _tools: HarmonyParser(has_tools=True), HarmonyParser.markers),
    "qwen3_coder": (Qwen3CoderParser, Qwen3CoderParser.markers),
    "qwen3_xml": (Qwen3CoderParser, Qwen3CoderParser.markers),
}


@dataclass(frozen=True)
class TranscriptFormat:
    """How a model marks its reasoning and its tool calls; None for what is not taken apart."""

    reasoning: ReasoningFormat | None = None
    tool_calls: ToolCallFormat | None = None

    def defect(self) -> str | None:
        """Why the two do not go together, None if they do."""
        if self.tool_calls == _HARMONY[0] and self.reasoning != _HARMONY[1]:
            return f"the tool-call parser {_HARMONY[0]!r} needs the reasoning parser {_HARMONY[1]!r}: both are harmony"
        if self.reasoning == _HARMONY[1] and self.tool_calls not in (None, _HARMONY[0]):
            return f"the reasoning parser {_HARMONY[1]!r} goes with the tool-call parser {_HARMONY[0]!r} only"
        return None

    @property
    def call_syntax(self) -> CallSyntax | None:
        """How a grammar writes calls of this format; None without one."""
        return _SYNTAXES.get(self.tool_calls) if self.tool_calls is not None else None

    @property
    def with_implied_calls(self) -> "TranscriptFormat":
        """This format, with harmony's calls where its reasoning is harmony's: the one implies the other."""
        return TranscriptFormat(self.reasoning, _HARMONY[0]) if self.reasoning == _HARMONY[1] else self

    @property
    def channel_syntax(self) -> ChannelSyntax | None:
        """How content and reasoning stand beside each other in a format with channels, None in any other."""
        return HarmonyParser.channels if self.reasoning == _HARMONY[1] else None

    def markers(self, *, has_tools: bool) -> tuple[str, ...]:
        """The texts that a parser has to see, even where they are special tokens."""
        reasoning: tuple[str, ...] = ()
        if self.reasoning is not None:
            reasoning = HarmonyParser.markers if self.reasoning == _HARMONY[1] else ThinkParser.markers
        return reasoning + (_CALLS[self.tool_calls][1] if has_tools and self.tool_calls else ())

    def reasoning_is_open(self, prompt_end: str, continued: str | None) -> bool:
        """Whether a reply begins inside the reasoning.

        Args:
            prompt_end: the last words of the prompt.
            continued: the message that the reply goes on with; None when it is a new one.
        """
        if self.reasoning in (None, _HARMONY[1]):
            return False
        if continued is not None:
            return continued.rfind(THINK) > continued.rfind(END_THINK)
        return prompt_end.rstrip().endswith(THINK)

    def expected_reasoning(self, prompt_end: str, continued: str | None) -> ExpectedReasoning:
        """Where the reply may have reasoning. The arguments are those of `reasoning_is_open`."""
        if self.reasoning_is_open(prompt_end, continued):
            return "open"
        # Templates that turn reasoning off close it in the prompt; a message that goes on has had its chance.
        if self.reasoning is None or continued is not None or prompt_end.rstrip().endswith(END_THINK):
            return "absent"
        return "channels" if self.reasoning == _HARMONY[1] else "optional"

    def parser(
        self, tools: ToolSchemas | None, *, reasoning_is_open: bool, plain_calls: TranscriptParser | None = None
    ) -> TranscriptParser | None:
        """A fresh parser for one reply.

        Args:
            tools: the tools that the reply may call; None when it may call none.
            reasoning_is_open: see `reasoning_is_open`.
            plain_calls: reads what follows the reasoning in place of the format's own parser of calls.

        Returns:
            None when all of the reply is content.
        """
        has_calls = tools is not None and self.tool_calls is not None
        if self.reasoning == _HARMONY[1]:
            return HarmonyParser(has_tools=has_calls)
        calls = plain_calls
        if calls is None and tools is not None and self.tool_calls is not None:
            calls = _CALLS[self.tool_calls][0](tools)
        if self.reasoning is None:
            return calls
        interrupts = (KIMI_SECTION_BEGIN,) if has_calls and self.tool_calls == "kimi_k2" else ()
        return ThinkParser(is_open=reasoning_is_open, interrupts=interrupts, rest=calls)
