"""The real server from outside: stop, n, disconnect, bad input beside good, tokens, signals."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import openai
import pytest

from .conftest import TINY
from .server_process import ServerProcess
from .test_goldens_over_http import EXTRA, GREEDY, assert_is_golden, goldens

PROMPT = "The quick brown fox"


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stop_strings_cut_the_text_whole_and_streamed(client: openai.OpenAI) -> None:
    request = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    text = client.completions.create(**request).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    choice = client.completions.create(stop=stop, **request).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    chunks = list(client.completions.create(stop=[stop], stream=True, **request))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_samples_of_n_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    request = {"model": "tiny", "prompt": PROMPT, "n": 3, "max_tokens": 12, "seed": 5, "temperature": 1}
    first = client.completions.create(**request)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    again = client.completions.create(**request)
    assert [choice.text for choice in again.choices] == texts
    streamed = ["", "", ""]
    for chunk in client.completions.create(stream=True, **request):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_chat_replies_with_logprobs_whose_bytes_are_the_text(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_completion_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    choice = chat.choices[0]
    content = choice.logprobs.content
    assert len(content) == chat.usage.completion_tokens == 20
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=20,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content


def test_a_client_that_leaves_frees_its_request(server: ServerProcess, client: openai.OpenAI) -> None:
    finished = "vllm:request_success_total"
    before = server.metric(finished, 'finished_reason="abort"')
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1900, "n": 2, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(stream=True, **request)
    next(iter(stream))
    stream.close()
    eventually(lambda: server.metric(finished, 'finished_reason="abort"') == before + 2)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**request)
    eventually(lambda: server.metric(finished, 'finished_reason="abort"') == before + 4)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


BAD = [
    ({"prompt": ""}, 400, "prompt"), ({"prompt": []}, 400, "prompt"), ({"prompt": [512]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"), ({"prompt": [5] * 2048}, 400, "prompt"),
    ({"max_tokens": 2048}, 400, "max_tokens"),
    ({"model": "other"}, 404, "model"), ({"prompt": 5}, 400, "prompt"), ({"temperature": -1}, 400, "temperature"),
    ({"top_p": "high"}, 400, "top_p"), ({"logit_bias": {"512": 1}}, 400, "logit_bias"),
    ({"stop_token_ids": [512]}, 400, "stop_token_ids"), ({"guided_json": "{"}, 400, "guided_json"),
    ({"best_of": 5}, 400, "best_of"), ({"n": 0}, 400, "n"),
]  # fmt: skip
BAD_BODIES = [b"", b"{", b'{"model": "\xff"}', b'{"model": "tiny", "prompt": "x", "temperature": NaN}', b"[]"]


def test_bad_input_is_refused_and_disturbs_no_other_request(server: ServerProcess) -> None:
    golden = goldens("llama")[2]
    results: list[tuple[int, dict]] = []
    request = GREEDY | EXTRA | {"prompt": golden["prompt_ids"]}
    threads = [
        threading.Thread(target=lambda: results.append(server.post("/v1/completions", request))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for extra, status, param in BAD:
        answered, body = server.post("/v1/completions", {"model": "tiny", "prompt": "x"} | extra)
        assert (answered, body["error"]["param"]) == (status, param), (extra, body)
        assert set(body["error"]) == {"message", "type", "param", "code"}
    for data in BAD_BODIES:
        answered, body = server.post("/v1/completions", data)
        assert answered == 400
        assert body["error"]["code"] == "invalid_json"
    assert server.post("/v1/completions", b"x" * (17 << 20))[0] == 413
    for thread in threads:
        thread.join(120)
    assert len(results) == 6
    for status, body in results:
        assert status == 200
        choice = body["choices"][0]
        assert_is_golden(golden, choice["token_ids"], choice["logprobs"]["token_logprobs"])
    assert json.loads(server.get("/health")) == {"status": "ok"}


def test_tokenize_and_detokenize_are_inverse(server: ServerProcess) -> None:
    status, tokens = server.post("/tokenize", {"model": "tiny", "prompt": PROMPT, "add_special_tokens": False})
    assert status == 200
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": PROMPT})


def test_start_prints_the_memory_report_and_a_command_that_works(server: ServerProcess) -> None:
    text = "".join(server.output)
    assert re.search(r"weights", text, re.IGNORECASE)
    assert re.search(r"arena", text, re.IGNORECASE)
    (line,) = [line for line in server.output if line.startswith("Try:")]
    words = shlex.split(line.removeprefix("Try:"))
    if shutil.which("curl"):
        done = subprocess.run([*words, "-sS", "--fail"], capture_output=True, text=True, timeout=120, check=True)
        reply = json.loads(done.stdout)
    else:
        status, reply = server.post(words[1].removeprefix(server.url), json.loads(words[-1]))
        assert status == 200
    assert reply["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_ends_with_0(
    small_options: list[str], number: signal.Signals
) -> None:
    golden = goldens("llama")[0]
    options = ["--model", str(TINY / "llama"), "--served-model-name=tiny", *small_options]
    with ServerProcess(options) as server:
        results = []
        request = GREEDY | EXTRA | {"prompt": golden["prompt_ids"], "n": 8}
        thread = threading.Thread(target=lambda: results.append(server.post("/v1/completions", request)))
        thread.start()
        eventually(lambda: bool(results) or server.metric("vllm:num_requests_running") > 0)
        assert server.stop(number) == 0, "".join(server.output)
        thread.join(60)
        assert results[0][0] == 200
        assert results[0][1]["choices"][0]["token_ids"] == golden["output_ids"]
        assert "Traceback" not in "".join(server.output)
