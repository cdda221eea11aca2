"""However a reply arrives, whole or in any pieces, complete or cut short, it says the same, and no text is lost."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.text.transcripts import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    TranscriptFormat,
)

from .transcripts import CODER, FORMATS, HARMONY, HERMES, KIMI, LLAMA, QWEN, TOOLS, TRANSCRIPTS, Transcript, joined

every_transcript = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.title)


def parsed(transcript: Transcript, pieces: list[str]) -> list[Event]:
    parser = transcript.parser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


@every_transcript
def test_whole_replies_say_what_they_should(transcript: Transcript) -> None:
    assert parsed(transcript, [transcript.text]) == transcript.events


@every_transcript
def test_every_cut_says_the_same(transcript: Transcript) -> None:
    text = transcript.text
    assert parsed(transcript, list(text)) == transcript.events
    for cut in range(len(text) + 1):
        assert parsed(transcript, [text[:cut], text[cut:]]) == transcript.events, text[:cut]


@every_transcript
def test_every_beginning_says_the_same_in_pieces(transcript: Transcript) -> None:
    for end in range(len(transcript.text)):
        text = transcript.text[:end]
        assert parsed(transcript, list(text)) == parsed(transcript, [text]), text


@every_transcript
def test_no_event_is_empty(transcript: Transcript) -> None:
    parser = transcript.parser()
    events = [event for piece in transcript.text for event in parser.feed(piece)] + parser.finish()
    assert all(event.text for event in events if not isinstance(event, CallBegun | CallEnded))


@pytest.mark.parametrize(
    ("form", "text", "event"),
    [
        (HERMES, "Hi <", Content("Hi")),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a', Arguments('{"a')),
        (QWEN, "<think>Hm", Reasoning("Hm")),
        (CODER, "</think><tool_call><function=weather><parameter=city>Sa", Arguments("Sa")),
        (LLAMA, '{"answer": 4', Content('{"answer": 4')),
        (HARMONY, "<|channel|>final<|message|>Hi", Content("Hi")),
        (KIMI, '</think><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"', Arguments('{"')),
    ],
)
def test_what_is_certain_is_not_held_back(form: TranscriptFormat, text: str, event: Event) -> None:
    parser = form.parser(TOOLS, reasoning_is_open=text.startswith("</think>"))
    assert parser is not None
    assert parser.feed(text)[-1] == event


PIECES = [
    "<", ">", "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "```", "é🎉", "{}", "</think>", "<think>",
    '{"name": "now", "arguments": {', '"name": "now"', '"parameters": {}', '{"a": ', "true", "json", "function",
    "functions.now:0", "assistant", " to=functions.now", "commentary", "analysis", "final", "weather",
    "<function=weather>", "<parameter=city>", "<parameter=days>", "<function=", "<parameter=", "</function>",
    '<invoke name="weather">', '<parameter name="city">', '<parameter name="days">', '<invoke name="',
]  # fmt: skip


@st.composite
def replies(draw, form: TranscriptFormat):
    """Heaps of the format's replies and markers, halves of them, JSON, and words to be found again; cut somewhere."""
    markers = form.markers(has_tools=True)
    texts = [transcript.text for transcript in TRANSCRIPTS if transcript.form == form]
    part = st.one_of(
        st.sampled_from(texts),
        st.sampled_from(markers),
        st.sampled_from(PIECES),
        st.sampled_from([marker[:-2] for marker in markers]),
        st.just("WORD"),
    )
    parts = draw(st.lists(part, max_size=20))
    text = "".join(f"w-{index}" if part == "WORD" else part for index, part in enumerate(parts))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def said(events: list[Event]) -> str:
    """Everything the events have of the text."""
    texts = (
        f"{event.name} {event.call_id}" if isinstance(event, CallBegun) else getattr(event, "text", "")
        for event in events
    )
    return "".join(texts)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.reasoning}-{form.tool_calls}")
def test_heaps_of_markers_never_raise_never_depend_on_cuts_and_lose_no_word(form) -> None:
    @given(reply=replies(form), is_open=st.booleans(), has_tools=st.booleans())
    @settings(max_examples=150, deadline=None)
    def check(reply, is_open, has_tools):
        text, pieces = reply
        has_tools = has_tools or form.reasoning is None
        transcript = Transcript(
            "", form, text, [], is_open and form.reasoning is not None, TOOLS if has_tools else None
        )
        whole = parsed(transcript, [text])
        assert parsed(transcript, pieces) == whole
        assert set(re.findall(r"w-\d+", said(whole))) == set(re.findall(r"w-\d+", text))
        for event, after in itertools.pairwise(whole):
            # Arguments belong to a call, whatever text stands between.
            if isinstance(event, CallEnded):
                assert not isinstance(after, Arguments | CallEnded)

    check()
