"""However a reply arrives, its events add up to the whole, in both protocols that have events of parts."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.bodies import convert_object
from tokenspeed_jax.serve.protocol.logprobs import TokenNames
from tokenspeed_jax.serve.protocol.messages import MessagesRequest
from tokenspeed_jax.serve.protocol.messages_reply import MessagesReply
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead
from tokenspeed_jax.serve.protocol.responses import ResponsesRequest
from tokenspeed_jax.serve.protocol.responses_reply import ResponsesReply
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.text import Detokenizer

from .fake_engine import EOS, byte_tokenizer
from .test_messages import ASK as MESSAGES_ASK
from .test_responses import ASK as RESPONSES_ASK
from .test_tools import tool_config

TOKENIZER = byte_tokenizer()
NAMES = TokenNames(TOKENIZER)
FORMAT = ReplyFormat(tool_config(), TOKENIZER)
HEAD = ReplyHead("id", "fake/model", 0, False)
PROMPT = TOKENIZER.encode("[user]Rain?")

WORDS = st.text(st.sampled_from("aäH ello€<\n{"), max_size=8)
ARGUMENTS = st.one_of(
    st.dictionaries(st.sampled_from(["city", "days"]), WORDS, max_size=2).map(json.dumps), st.just('{"city": ')
)
CALL = ARGUMENTS.map(lambda text: f'<tool_call>\n{{"name": "weather", "arguments": {text}}}\n</tool_call>')
PIECES = st.lists(st.one_of(WORDS, CALL), max_size=4).map("".join)
REPLIES = st.one_of(PIECES, st.tuples(WORDS, PIECES).map(lambda two: f"<think>\n{two[0]}\n</think>\n\n{two[1]}"))


def deltas_of(reply: str, cuts: Sequence[int], reason: Any) -> list[RequestDelta]:
    """The reply token by token, with what `cuts` says together."""
    ids = [*TOKENIZER.encode(reply), EOS]
    bounds = sorted({0, len(ids), *(cut % len(ids) for cut in cuts)})
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    deltas = []
    for start, end in pairwise(bounds):
        text = detokenizer.push(ids[start:end])
        is_last = end == len(ids)
        deltas.append(
            RequestDelta(
                request_id="id",
                sample_index=0,
                prompt_token_ids=PROMPT,
                cached_tokens=3,
                token_ids=ids[start:end],
                text=text + (detokenizer.flush() if is_last else ""),
                logprobs=[-float(position) for position in range(start, end)],
                top_logprobs=[{token: -math.inf} for token in ids[start:end]],
                finish_reason=reason if is_last else None,
            )
        )
    return deltas


def streamed(make: Any, deltas: Sequence[RequestDelta]) -> list[Any]:
    reply, choice = make(), Choice(0, 0, PROMPT, keeps_output=False)
    sent = reply.opening()
    for delta in deltas:
        choice.push(delta)
        sent += reply.growth(0, delta)
    sent += reply.closing([choice])
    return [json.loads(block.split("\ndata: ")[1]) for block in sent.decode().removesuffix("\n\n").split("\n\n")]


def whole(make: Any, deltas: Sequence[RequestDelta]) -> Any:
    return json.loads(whole_body(make(), deltas))


def whole_body(reply: Any, deltas: Sequence[RequestDelta]) -> bytes:
    choice = Choice(0, 0, PROMPT, keeps_output=reply.keeps_choices)
    for delta in deltas:
        choice.push(delta)
        reply.take(0, delta)
    return reply.body([choice])


def responses_reply() -> ResponsesReply:
    request = convert_object(RESPONSES_ASK | {"top_logprobs": 1}, ResponsesRequest)
    return ResponsesReply(HEAD, request, SamplingParams(logprobs=True, top_logprobs=1), NAMES, FORMAT)


def messages_reply() -> MessagesReply:
    request = convert_object(MESSAGES_ASK, MessagesRequest)
    return MessagesReply(HEAD, request, SamplingParams(), NAMES, FORMAT)


def without_ids(items: Any) -> Any:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def response_of(events: list[Any]) -> tuple[list[Any], Any]:
    """The items that the events of a stream of responses add up to, and its last response."""
    items: list[Any] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                (part,) = items[-1]["content"]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == items[-1]["arguments"]
            case "content_part.done":
                assert items[-1]["content"] == [event["part"]]
            case "output_item.done":
                assert event["item"] | {"status": "in_progress"} == items[-1]
                items[-1] = event["item"]
    return items, events[-1]["response"]


def message_of(events: list[Any]) -> Any:
    """The message that the events of a stream of messages add up to."""
    message = events[0]["message"]
    written: list[str] = []
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                written.append("")
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                assert event["index"] == len(written) - 1
                written[-1] += delta.get("partial_json", "")
                if "partial_json" not in delta:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "message_delta":
                message |= event["delta"] | {name: event[name] for name in ("usage", "weight_version")}
    for block, text in zip(message["content"], written, strict=True):
        if block["type"] == "tool_use" and text:
            try:
                block["input"] = json.loads(text)
            except ValueError:
                block["input"] = {"INVALID_JSON": text}
    return message


@settings(max_examples=80, deadline=None)
@given(REPLIES, st.lists(st.integers(0, 400), max_size=60), st.sampled_from(["stop", "length"]))
def test_events_add_up_to_the_whole(reply: str, cuts: list[int], reason: str) -> None:
    deltas = deltas_of(reply, cuts, reason)
    items, last = response_of(streamed(responses_reply, deltas))
    assert last["output"] == items
    body = whole(responses_reply, deltas)
    assert without_ids(body["output"]) == without_ids(items)
    assert {name: body[name] for name in body if name != "output"} == {
        name: last[name] for name in last if name != "output"
    }
    message = message_of(streamed(messages_reply, deltas))
    body = whole(messages_reply, deltas)
    assert without_ids(message.pop("content")) == without_ids(body.pop("content"))
    assert message == body


@settings(max_examples=60, deadline=None)
@given(REPLIES, st.lists(st.integers(0, 400), max_size=60))
def test_parts_are_the_same_however_the_reply_is_cut(reply: str, cuts: list[int]) -> None:
    cut, uncut = (whole(responses_reply, deltas_of(reply, places, "stop")) for places in (cuts, ()))

    def contents(body: Any) -> Any:
        return [[item.get("arguments"), [part["text"] for part in item.get("content", ())]] for item in body["output"]]

    assert contents(cut) == contents(uncut)


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("aäH ello€\n{"), min_size=1, max_size=30), st.text("xy", max_size=5))
def test_logprobs_spell_the_text_when_tokens_come_one_by_one(text: str, thought: str) -> None:
    text = text.strip()
    reply = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
    output = whole(responses_reply, deltas_of(reply, range(400), "stop"))["output"]
    (part,) = (part for item in output if item["type"] == "message" for part in item["content"]) if text else (None,)
    if part is not None:
        assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == text
        positions = [entry["logprob"] for entry in part["logprobs"]]
        assert positions == sorted(set(positions), reverse=True)


@pytest.mark.parametrize("arguments", ['{"city": Köln}', '{"city": "Köln"', '{"a": ' * 2000 + "1" + "}" * 2000, "{"])
def test_arguments_that_are_no_object_are_handed_on_in_one(arguments: str) -> None:
    deltas = deltas_of(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}', (), "length")
    (block,) = whole(messages_reply, deltas)["content"]
    assert block["input"] == {"INVALID_JSON": arguments}


def test_numbers_in_arguments_stay_as_they_were_written() -> None:
    deltas = deltas_of('<tool_call>\n{"name": "weather", "arguments": {"n": 1.10}}\n</tool_call>', (), "stop")
    assert b'"input":{"n": 1.10}' in whole_body(messages_reply(), deltas)
