"""`/generate` in SGLang's form: ids in, ids and log-probabilities out, whole or streamed."""

import base64
import threading

import numpy as np
import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import BOS, EOS, FakeEngine, experts_of
from .sse import events, joined
from .test_bad_input import refused
from .test_lifecycle import eventually

PATH = "/generate"
TEXT = "Hello wörld €!"
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 100}}


def test_ids_are_answered_with_ids_text_and_counts(client: TestClient, engine: FakeEngine) -> None:
    reply = client.post(PATH, json=BODY)
    assert reply.status_code == 200
    body = reply.json()
    meta = body.pop("meta_info")
    assert body == {"text": TEXT, "output_ids": [*engine.reply_ids, EOS]}
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": reply.headers["x-request-id"],
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 3,
        "completion_tokens": len(engine.reply_ids) + 1,
        "cached_tokens": 3,
        "weight_version": 7,
    }
    assert engine.submitted[0][0] == [5, 6, 7]


def test_text_is_tokenised_and_128_tokens_are_the_default(client: TestClient, engine: FakeEngine) -> None:
    assert client.post(PATH, json={"text": "Hello"}).status_code == 200
    prompt, params = engine.submitted[0]
    assert prompt == engine.tokenizer.encode("Hello")
    assert (params.max_tokens, params.temperature, params.n, params.logprobs) == (128, 1.0, 1, False)
    client.post(PATH, json={"text": "Hello", "sampling_params": {"max_new_tokens": None}})
    assert engine.submitted[1][1].max_tokens is None


def test_every_sampling_parameter_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    same = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "stop_token_ids": [4], "ignore_eos": True, "n": 2,
        "skip_special_tokens": False,
    }  # fmt: skip
    other = {"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 11, "stop": "zz", "logit_bias": {"5": -1.5}}
    body = BODY | {"sampling_params": same | other, "return_logprob": True, "top_logprobs_num": 2}
    assert client.post(PATH, json=body).status_code == 200
    params = engine.submitted[0][1]
    assert {name: getattr(params, name) for name in same} == same | {"stop_token_ids": (4,)}
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (9, 2, 11, ("zz",))
    assert dict(params.logit_bias) == {5: -1.5}
    assert (params.logprobs, params.top_logprobs) == (True, 2)
    assert client.post(PATH, json=BODY | {"sampling_params": {"top_k": -1}}).status_code == 200
    assert engine.submitted[-1][1].top_k == 0


def test_priority_and_salt_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    assert client.post(PATH, json=BODY | {"priority": -3, "cache_salt": "s"}).status_code == 200
    assert client.post(PATH, json=BODY).status_code == 200
    assert engine.options == [RequestOptions(-3, "s"), RequestOptions()]
    refused(client.post(PATH, json=BODY | {"priority": "high"}), 400, "priority")


def test_log_probabilities_stand_beside_their_ids(client: TestClient, engine: FakeEngine) -> None:
    ids = [*engine.reply_ids, EOS]
    meta = client.post(PATH, json=BODY | {"return_logprob": True}).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in ids]
    assert meta["output_token_sampling_logprobs"] == [[-0.25, token, None] for token in ids]
    assert "output_top_logprobs" not in meta
    body = BODY | {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = client.post(PATH, json=body).json()["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, ids[0], "Hello"]
    # Minus infinity, which JSON cannot say, is what the second alternative has.
    assert [[entry[:2] for entry in top] for top in meta["output_top_logprobs"]] == [
        [[-0.5, token], [-9999.0, (token + 1) % 263]] for token in ids
    ]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        ({"stop": ["lo"], "max_new_tokens": 9}, {"type": "stop", "matched": "lo"}),
        ({"stop_token_ids": [261], "max_new_tokens": 9}, {"type": "stop", "matched": 261}),
    ],
)
def test_the_reason_says_what_ended_a_sample(client: TestClient, sampling: dict, reason: dict) -> None:
    assert client.post(PATH, json=BODY | {"sampling_params": sampling}).json()["meta_info"]["finish_reason"] == reason
    *_, last, done = events(client, PATH, BODY | {"sampling_params": sampling})
    assert (last["meta_info"]["finish_reason"], done) == (reason, "[DONE]")


@pytest.mark.parametrize("prompts", [{"input_ids": [[5, 6], [7]]}, {"text": ["a", "b"]}, {"input_ids": [[5, 6]]}])
@pytest.mark.parametrize("n", [1, 2])
def test_lists_are_answered_with_lists_prompt_by_prompt(
    client: TestClient, engine: FakeEngine, prompts: dict, n: int
) -> None:
    engine.script = lambda prompt, index: [10 * len(prompt) + index, EOS]
    body = {**prompts, "sampling_params": {"n": n}, "rid": "mine"}
    replies = client.post(PATH, json=body).json()
    sizes = [len(prompt) for prompt, _ in engine.submitted]
    expected = [(f"mine-{i}", [10 * size + index, EOS]) for i, size in enumerate(sizes) for index in range(n)]
    assert [(reply["meta_info"]["id"], reply["output_ids"]) for reply in replies] == expected
    *chunks, _ = events(client, PATH, body)
    finals = [chunk for chunk in chunks if chunk["meta_info"]["finish_reason"]]
    assert [
        (final["meta_info"]["id"], final["output_ids"]) for final in sorted(finals, key=lambda final: final["index"])
    ] == expected


def test_samples_of_one_prompt_are_a_list_under_its_id(client: TestClient) -> None:
    replies = client.post(PATH, json=BODY | {"sampling_params": {"n": 3}, "rid": "one"}).json()
    assert [reply["meta_info"]["id"] for reply in replies] == ["one"] * 3


def test_chunks_hold_all_so_far_and_the_last_one_is_the_whole_reply(client: TestClient) -> None:
    body = BODY | {"return_logprob": True, "rid": "x"}
    whole = client.post(PATH, json=body).json()
    *chunks, done = events(client, PATH, body)
    assert done == "[DONE]"
    for reply in (whole, chunks[-1]):
        reply["meta_info"].pop("e2e_latency")
    assert chunks[-1] == whole
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == list(range(1, len(chunks) + 1))
    for chunk in chunks:
        assert TEXT.startswith(chunk["text"])
        assert chunk["output_ids"] == whole["output_ids"][: chunk["meta_info"]["completion_tokens"]]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"])
        assert len(chunk["meta_info"]["output_weight_versions"]) == len(chunk["output_ids"])
        assert (chunk["meta_info"]["finish_reason"] is None) == (chunk is not chunks[-1])


def test_routed_experts_come_in_base64_at_the_end(client: TestClient, engine: FakeEngine) -> None:
    body = BODY | {"return_routed_experts": True}
    whole = client.post(PATH, json=body).json()["meta_info"]
    assert engine.submitted[0][1].return_routed_experts
    experts = np.frombuffer(base64.b64decode(whole["routed_experts"]), "<i4").reshape(whole["routed_experts_shape"])
    np.testing.assert_array_equal(experts, experts_of(BODY["input_ids"]))
    *chunks, _ = events(client, PATH, body)
    told = [chunk["meta_info"].get("routed_experts") for chunk in chunks]
    assert told == [None] * (len(chunks) - 1) + [whole["routed_experts"]]
    assert "routed_experts" not in client.post(PATH, json=BODY).json()["meta_info"]


def test_incremental_chunks_join_to_the_whole_reply(engine: FakeEngine) -> None:
    config = ServerConfig(incremental_streaming_output=True)
    body = BODY | {"return_logprob": True, "top_logprobs_num": 1}
    with TestClient(create_app(engine, config)) as client:
        whole = client.post(PATH, json=body).json()
        *chunks, _ = events(client, PATH, body)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert joined(chunk["output_ids"] for chunk in chunks) == whole["output_ids"]
    for name in ("output_token_logprobs", "output_top_logprobs", "output_weight_versions"):
        assert joined(chunk["meta_info"][name] for chunk in chunks) == whole["meta_info"][name]
    last = chunks[-1]["meta_info"]
    assert last["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert last["completion_tokens"] == len(whole["output_ids"])


def test_an_id_in_use_is_refused_and_its_owner_goes_on(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    replies = []
    thread = threading.Thread(target=lambda: replies.append(client.post(PATH, json=BODY | {"rid": "mine"})))
    thread.start()
    eventually(lambda: engine.stats().running == 1)
    refused(client.post(PATH, json=BODY | {"rid": "mine"}), 400, "rid")
    assert engine.aborted == []
    engine.allow(10**9)
    thread.join(30)
    assert replies[0].json()["text"] == TEXT
    assert replies[0].headers["x-request-id"] == replies[0].json()["meta_info"]["id"] == "mine"
    assert client.post(PATH, json=BODY | {"rid": "mine"}).status_code == 200


WRONG = [
    ({"input_ids": None}, "input_ids"), ({"text": "x"}, "input_ids"), ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"), ({"input_ids": [1, [2]]}, "input_ids"), ({"input_ids": [10**6]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"), ({"input_ids": "5"}, "input_ids"), ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [[5]] * 2049}, "input_ids"), ({"input_ids": None, "text": ""}, "text"),
    ({"input_ids": None, "text": ["a", ""]}, "text"), ({"input_ids": None, "text": "x" * 300}, "text"),
    ({"sampling_params": []}, "sampling_params"), ({"sampling_params": [{}]}, "sampling_params"),
    ({"rid": ""}, "rid"), ({"rid": "a\r\nb: c"}, "rid"), ({"rid": "ü"}, "rid"), ({"rid": "x" * 257}, "rid"),
    ({"rid": ["a"]}, "rid"), ({"return_logprob": 1}, "return_logprob"), ({"top_logprobs_num": 2}, "top_logprobs_num"),
    ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"return_text_in_logprobs": True}, "return_text_in_logprobs"), ({"logprob_start_len": 0}, "logprob_start_len"),
    ({"logprob_start_len": 3, "return_logprob": True}, "logprob_start_len"),
    ({"logprob_start_len": -2, "return_logprob": True}, "logprob_start_len"),
    ({"logprob_start_len": "0", "return_logprob": True}, "logprob_start_len"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob"), ({"image_data": "x"}, "image_data"),
    ({"input_embeds": [[1.0]]}, "input_embeds"), ({"lora_path": "x"}, "lora_path"), ({"stream": 1}, "stream"),
    ({"return_hidden_states": True}, "return_hidden_states"), ({"colour": "red"}, "colour"),
    ({"prompt": "x"}, "prompt"),
]  # fmt: skip
WRONG_SAMPLING = [
    ("max_new_tokens", 0), ("max_new_tokens", 1000), ("max_new_tokens", "5"), ("min_new_tokens", 129),
    ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", -2), ("top_k", 1.5), ("min_p", 2),
    ("frequency_penalty", 3), ("presence_penalty", -3), ("repetition_penalty", 0), ("sampling_seed", -1),
    ("stop", [""]), ("stop", 5), ("stop_token_ids", [-1]), ("n", 0), ("n", 129), ("ignore_eos", 1),
    ("skip_special_tokens", "no"), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 1000}), ("json_schema", "{"),
    ("regex", ""), ("ebnf", "a"), ("structural_tag", "a"), ("stop_regex", "a"), ("no_stop_trim", 1),
    ("custom_params", {"a": 1}), ("max_tokens", 5), ("colour", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "param"),
    [*WRONG, *(({"sampling_params": {name: value}}, f"sampling_params.{name}") for name, value in WRONG_SAMPLING)],
)
def test_wrong_fields_are_refused_by_their_own_name(
    client: TestClient, engine: FakeEngine, extra: dict, param: str
) -> None:
    reply = client.post(PATH, json=BODY | extra)
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["param"] or "").split("[")[0] == param
    assert engine.stats().running == 0


def test_fields_that_ask_for_nothing_are_taken(client: TestClient) -> None:
    neutral = {
        "image_data": None, "lora_path": None, "return_hidden_states": False, "logprob_start_len": -1,
        "token_ids_logprob": [], "modalities": [], "log_metrics": True, "session_params": {}, "stream": False,
    }  # fmt: skip
    sampling = {"json_schema": None, "regex": None, "no_stop_trim": False, "spaces_between_special_tokens": True}
    assert client.post(PATH, json=BODY | neutral | {"sampling_params": sampling}).status_code == 200


def test_another_model_and_a_dead_engine_are_refused(client: TestClient, engine: FakeEngine) -> None:
    assert client.post(PATH, json=BODY | {"model": "fake/model"}).status_code == 200
    refused(client.post(PATH, json=BODY | {"model": "other"}), 404, "model")
    engine.die()
    assert refused(client.post(PATH, json=BODY), 503, None)["code"] == "engine_unavailable"


def test_prompts_of_text_get_the_special_tokens_of_the_tokenizer(client: TestClient, engine: FakeEngine) -> None:
    engine.tokenizer.encode = lambda text, add_special_tokens=True: [BOS] * add_special_tokens + [5] * len(text)
    client.post(PATH, json={"text": "ab"})
    assert engine.submitted[0][0] == [BOS, 5, 5]
