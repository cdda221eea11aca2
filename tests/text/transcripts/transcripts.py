"""Replies as models write them, with what they say."""

# ruff: noqa: RUF001 - DeepSeek's markers have these bars

from dataclasses import dataclass, field
from typing import Any

from tokenspeed_jax.text.transcripts import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    TranscriptFormat,
    TranscriptParser,
)

TOOLS = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "hourly": {"type": "boolean"},
            "places": {"type": ["array", "object"]},
        }
    },
    "now": {},
}


@dataclass(frozen=True)
class Transcript:
    """One reply and the events it becomes, neighbours of one kind joined."""

    title: str
    form: TranscriptFormat
    text: str
    events: list[Event]
    is_open: bool = False
    tools: dict[str, Any] | None = field(default_factory=lambda: TOOLS)

    def parser(self) -> TranscriptParser:
        parser = self.form.parser(self.tools, reasoning_is_open=self.is_open)
        assert parser is not None
        return parser


def joined(events: list[Event]) -> list[Event]:
    """The events with neighbouring texts of one kind as one."""
    result: list[Event] = []
    for event in events:
        if result and type(result[-1]) is type(event) and isinstance(event, Content | Reasoning | Arguments):
            result[-1] = type(event)(result[-1].text + event.text)
        else:
            result.append(event)
    return result


def call(name: str, arguments: str, call_id: str | None = None) -> list[Event]:
    return [CallBegun(name, call_id), Arguments(arguments), CallEnded()]


HERMES = TranscriptFormat(None, "hermes")
QWEN = TranscriptFormat("qwen3", "hermes")
CODER = TranscriptFormat("qwen3", "qwen3_coder")
LLAMA = TranscriptFormat(None, "llama3_json")
HARMONY = TranscriptFormat("openai_gptoss", "openai")
V3 = TranscriptFormat("deepseek_r1", "deepseek_v3")
V31 = TranscriptFormat("deepseek_v3", "deepseek_v31")
KIMI = TranscriptFormat("kimi_k2", "kimi_k2")
MINIMAX = TranscriptFormat("minimax_m2", "minimax_m2")
FORMATS = (HERMES, QWEN, CODER, LLAMA, HARMONY, V3, V31, KIMI, MINIMAX)

V3_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Ulm"}\n```<｜tool▁call▁end｜>'
MINIMAX_CALLS = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Sankt "Pölten"</parameter>
<parameter name="days">3</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>"""

TRANSCRIPTS = [
    Transcript("plain text", HERMES, "No <tool> needed: 1 < 2.\n", [Content("No <tool> needed: 1 < 2.\n")]),
    Transcript("nothing", HERMES, "", []),
    Transcript(
        "hermes",
        HERMES,
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm 🎉", "at": {"x": [1, "}"]}}}\n'
        "</tool_call>",
        [Content("Let me look."), *call("weather", '{"city": "Ulm 🎉", "at": {"x": [1, "}"]}}')],
    ),
    Transcript(
        "hermes: two calls, a marker and a quote inside a string, text behind",
        HERMES,
        '<tool_call>{"name":"weather","arguments":{"city":"</tool_call>\\"{"}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\nDone. ',
        [*call("weather", '{"city":"</tool_call>\\"{"}'), *call("now", "{}"), Content("\nDone. ")],
    ),
    Transcript(
        "hermes: arguments first, or in a string, or with more keys, or without the last brace",
        HERMES,
        '<tool_call>{"arguments": {"city": "é"}, "name": "weather"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"a": 1}, "id": "}"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"a": 2}</tool_call>',
        [
            *call("weather", '{"city": "é"}'),
            *call("weather", '{"city": 1}'),
            *call("weather", '{"a": 1}'),
            *call("weather", '{"a": 2}'),
        ],
    ),
    Transcript(
        "hermes: no calls",
        HERMES,
        'a <tool_call>\nnow()</tool_call> <tool_call>{"name": 5, "arguments": {}}</tool_call><tool_call>{"name": ""} ',
        [
            Content(
                'a <tool_call>\nnow()</tool_call> <tool_call>{"name": 5, "arguments": {}}</tool_call>'
                '<tool_call>{"name": ""} '
            )
        ],
    ),
    Transcript(
        "hermes: a call cut short",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "U',
        [CallBegun("weather"), Arguments('{"city": "U')],
    ),
    Transcript(
        "hermes: broken arguments end at the marker",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": </tool_call><tool_call>{"name": "now", "arguments": {}}',
        [CallBegun("weather"), Arguments('{"city": '), *call("now", "{}")],
    ),
    Transcript(
        "qwen3: reasoning, then a call",
        QWEN,
        '<think>\nThey want <tool_call>.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [Reasoning("They want <tool_call>."), *call("now", "{}")],
    ),
    Transcript(
        "qwen3: the prompt opened the reasoning",
        QWEN,
        "Hm.\n</think>\n\nHi <b>",
        [Reasoning("Hm."), Content("Hi <b>")],
        True,
    ),
    Transcript("qwen3: reasoning cut short", QWEN, "<think>Hm </thin", [Reasoning("Hm </thin")]),
    Transcript("qwen3: empty reasoning", QWEN, "<think>\n\n</think>\n\nHi", [Content("Hi")]),
    Transcript("qwen3: no reasoning", QWEN, " Hi </think> <think>x", [Content(" Hi </think> <think>x")]),
    Transcript(
        "qwen3 without tools",
        QWEN,
        '<think>a</think><tool_call>{"name": "now", "arguments": {}}',
        [Reasoning("a"), Content('<tool_call>{"name": "now", "arguments": {}}')],
        tools=None,
    ),
    Transcript(
        "qwen3-coder",
        CODER,
        '</think>\n\nI look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\n\nUlm\n<b> "x"\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=places>\n[{"a": 1}]\n</parameter>\n<parameter=other>\n5\n</parameter>\n</function>\n</tool_call>',
        [
            Content("I look."),
            *call(
                "weather",
                '{"city": "\\nUlm\\n<b> \\"x\\"\\n", "days": 3, "hourly": true, "units": null, "places": [{"a": 1}], '
                '"other": "5"}',
            ),
        ],
        True,
    ),
    Transcript(
        "qwen3-coder: forgotten closing tags",
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n<parameter=days>\nsoon\n</function>\n</tool_call>"
        "<tool_call><function=now></tool_call>",
        [*call("weather", '{"city": "Ulm", "days": "soon"}'), *call("now", "{}")],
    ),
    Transcript(
        "qwen3-coder: cut short in a string",
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nUl\n",
        [CallBegun("weather"), Arguments('{"city": "Ul\\n')],
    ),
    Transcript(
        "qwen3-coder: cut short in a number",
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=days>\n1</par",
        [CallBegun("weather"), Arguments('{"days": \n1</par')],
    ),
    Transcript(
        "qwen3-coder: no call, and text inside a call",
        CODER,
        "<tool_call>\n<function=>\n</tool_call> <tool_call><function=now>oh <b> <parameter=\n></function></tool_call>",
        [
            Content("<tool_call>\n<function=>\n</tool_call>"),
            CallBegun("now"),
            Content("oh <b><parameter=\n>"),
            Arguments("{}"),
            CallEnded(),
        ],
    ),
    Transcript(
        "llama3", LLAMA, '\n{"name": "weather", "parameters": {"city": "Ulm"}}', call("weather", '{"city": "Ulm"}')
    ),
    Transcript(
        "llama3: tag and several calls",
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "weather", "parameters": {"a": 1}}\n',
        [*call("now", "{}"), *call("weather", '{"a": 1}')],
    ),
    Transcript(
        "llama3: text, then a tagged call, then more",
        LLAMA,
        'Well. <|python_tag|>{"name": "now", "parameters": {}};; bye',
        [Content("Well."), *call("now", "{}"), Content(";; bye")],
    ),
    Transcript("llama3: a JSON answer", LLAMA, '{"answer": {"name": 1}} ', [Content('{"answer": {"name": 1}} ')]),
    Transcript("llama3: code", LLAMA, "<|python_tag|>print({})", [Content("<|python_tag|>print({})")]),
    Transcript(
        "llama3: an object that never ends", LLAMA, '{"name": "x", "age": [', [Content('{"name": "x", "age": [')]
    ),
    Transcript(
        "harmony",
        HARMONY,
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Ulm"}<|call|>',
        [Reasoning("Need weather."), Content("I look."), *call("weather", '{"city": "Ulm"}')],
    ),
    Transcript(
        "harmony: recipient before the channel, and the last token not shown",
        HARMONY,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}',
        call("weather", '{"city": "Ulm"}'),
    ),
    Transcript(
        "harmony: two thoughts and a reply",
        HARMONY,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi <b>\n<|return|>",
        [Reasoning("a\nb"), Content("Hi <b>")],
    ),
    Transcript(
        "harmony: a call cut short",
        HARMONY,
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": ',
        [CallBegun("weather"), Arguments('{"city": ')],
    ),
    Transcript(
        "harmony: a tool that nobody serves",
        HARMONY,
        "<|channel|>commentary to=browser.open<|message|>{}<|call|>",
        [Content("<|channel|>commentary to=browser.open<|message|>{}<|call|>")],
    ),
    Transcript(
        "harmony without tools",
        HARMONY,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}",
        [Reasoning("a"), Content("<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}")],
        tools=None,
    ),
    Transcript("harmony: none", HARMONY, "Hello <|chan|> you", [Content("Hello <|chan|> you")]),
    Transcript(
        "harmony: a header that is none, then a message",
        HARMONY,
        "<|channel|>fin al x<|message|>a<|start|>assistant<|channel|>final<|message|>b",
        [Content("<|channel|>fin al x<|message|>ab")],
    ),
    Transcript("harmony: a header cut short", HARMONY, "<|channel|>anal", [Content("<|channel|>anal")]),
    Transcript(
        "deepseek v3",
        V3,
        "<think>\nHm.\n</think>\n\nI look.<｜tool▁calls▁begin｜>" + V3_CALL + "\n" + V3_CALL + "<｜tool▁calls▁end｜>",
        [
            Reasoning("Hm."),
            Content("I look."),
            *call("weather", '{"city": "Ulm"}'),
            *call("weather", '{"city": "Ulm"}'),
        ],
    ),
    Transcript(
        "deepseek v3: no calls",
        V3,
        "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜> <｜tool▁call▁begin｜>x<｜tool▁sep｜>y{}",
        [Content("<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜> <｜tool▁call▁begin｜>x<｜tool▁sep｜>y{}")],
    ),
    Transcript(
        "deepseek v3.1",
        V31,
        'Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Ulm"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Reasoning("Hm."), *call("weather", '{"city": "Ulm"}'), *call("now", "{}")],
        True,
    ),
    Transcript(
        "kimi: reasoning that a section ends",
        KIMI,
        "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Ulm"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [
            Reasoning("Hm."),
            *call("weather", '{"city": "Ulm"}', "functions.weather:0"),
            *call("now", "{}", "functions.now:1"),
        ],
        True,
    ),
    Transcript(
        "kimi: no index",
        KIMI,
        "<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}<|tool_call_end|>",
        [Content("<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}<|tool_call_end|>")],
    ),
    Transcript(
        "minimax",
        MINIMAX,
        "Hm.\n</think>\n\nI look.\n" + MINIMAX_CALLS,
        [
            Reasoning("Hm."),
            Content("I look."),
            *call("weather", '{"city": "Sankt \\"Pölten\\"", "days": 3}'),
            *call("now", "{}"),
        ],
        True,
    ),
]
