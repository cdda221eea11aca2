"""SmolLM2-135M-Instruct through the real server: the goldens' tokens, texts and log-probabilities."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from .conftest import TINY
from .server_process import ServerProcess

GOLDEN = json.loads((TINY.parent / "smollm2-135m.json").read_text())
GREEDY = {"model": "smollm2", "temperature": 0, "max_tokens": 64}
EXTRA = {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: str | Path, compiled_programs: Path) -> Iterator[openai.OpenAI]:
    options = [
        "--model", str(smollm2_path), "--served-model-name=smollm2", "--port=0", "--dtype=float32",
        "--max-num-seqs=4", "--max-num-batched-tokens=256", "--max-model-len=1024",
        f"--compilation-cache-dir={compiled_programs}", "--disable-progress-bars",
    ]  # fmt: skip
    with (
        ServerProcess(options) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("golden", GOLDEN["prompts"], ids=lambda golden: golden["id"])
def test_text_prompts_give_the_golden_reply(smollm2: openai.OpenAI, golden: dict[str, Any]) -> None:
    extra = EXTRA | {"add_special_tokens": golden["add_special_tokens"]}
    reply = smollm2.completions.create(prompt=golden["text"], logprobs=0, extra_body=extra, **GREEDY)
    choice = reply.choices[0]
    assert choice.model_extra["prompt_token_ids"] == golden["prompt_ids"]
    assert choice.model_extra["token_ids"] == golden["output_ids"]
    assert choice.text == golden["output_text"]
    assert choice.logprobs.token_logprobs == pytest.approx(golden["output_logprobs"], abs=1e-3)


@pytest.mark.parametrize(
    "golden", [prompt for prompt in GOLDEN["prompts"] if prompt.get("messages")], ids=lambda golden: golden["id"]
)
def test_conversations_give_the_golden_reply_streamed(smollm2: openai.OpenAI, golden: dict[str, Any]) -> None:
    stream = smollm2.chat.completions.create(
        messages=golden["messages"], stream=True, stream_options={"include_usage": True}, extra_body=EXTRA, **GREEDY
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == golden["output_text"]
    assert chunks[-1].usage.prompt_tokens == len(golden["prompt_ids"])
