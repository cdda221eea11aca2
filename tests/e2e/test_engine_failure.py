"""A step that fails in the real server: everybody is told, and the process does not live on."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenspeed_jax.serve.http_server import ENGINE_FAILED

from .conftest import TINY
from .server_process import ServerProcess
from .test_server import PROMPT

BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 500, "ignore_eos": True}


def stream(server: ServerProcess) -> str:
    body = json.dumps(BODY | {"stream": True}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


def test_a_failed_step_is_a_500_to_all_and_ends_the_process(small_options: list[str]) -> None:
    options = ["--model", str(TINY / "llama"), "--served-model-name=tiny", "--no-warmup", *small_options]
    program = (str(Path(__file__).with_name("faulty_server.py")),)
    with ServerProcess(options, program) as server, ThreadPoolExecutor(4) as pool:
        streamed = pool.submit(stream, server)
        wholes = [pool.submit(server.post, "/v1/completions", BODY | {"n": 2}) for _ in range(2)]
        for whole in wholes:
            status, body = whole.result()
            assert (status, body["error"]["code"]) == (500, "engine_failed")
        # The process answers for a moment yet, so that a prober sees why it goes.
        status, body = server.post("/v1/completions", BODY)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        first, *_, last = [block for block in streamed.result().split("\n\n") if block]
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert server.wait() == ENGINE_FAILED
    output = "".join(server.output)
    assert "out of device memory in a step; lower --gpu-memory-utilization" in output
    assert "injected fault" in output
    assert "the engine has failed" in output
