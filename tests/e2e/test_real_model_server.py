"""Two real checkpoints through the real server: the recorded tokens, texts and log-probabilities."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from ..real_models import MAX_NUM_SEQS, REAL_MODELS
from .conftest import TINY
from .server_process import ServerProcess

GREEDY = {"model": "real", "temperature": 0, "max_tokens": 64}
EXTRA = {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}


class Served(NamedTuple):
    client: openai.OpenAI
    prompts: list[dict[str, Any]]
    has_chat_template: bool


@pytest.fixture(scope="module", params=REAL_MODELS)
def served(request: pytest.FixtureRequest, compiled_programs: Path) -> Iterator[Served]:
    sizes = REAL_MODELS[request.param]
    path = request.getfixturevalue(sizes.path_fixture)
    prompts = json.loads((TINY.parent / f"{request.param}.json").read_text())["prompts"]
    options = [
        "--model", str(path), "--served-model-name=real", "--port=0", "--dtype=float32", "--no-warmup",
        f"--max-model-len={sizes.max_model_len}", f"--max-num-seqs={MAX_NUM_SEQS}",
        f"--max-num-batched-tokens={sizes.max_num_batched_tokens}",
        f"--kv-cache-memory-bytes={sizes.arena_bytes}", f"--compilation-cache-dir={compiled_programs}",
        "--disable-progress-bars",
    ]  # fmt: skip
    with (
        ServerProcess(options) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(client, prompts, has_chat_template=request.param == "smollm2-135m")


def test_texts_sent_together_give_the_golden_replies(served: Served) -> None:
    for add_special_tokens in (True, False):
        goldens = [golden for golden in served.prompts if golden["add_special_tokens"] == add_special_tokens]
        if not goldens:
            continue
        reply = served.client.completions.create(
            prompt=[golden["text"] for golden in goldens],
            logprobs=0,
            echo=add_special_tokens,
            extra_body=EXTRA | {"add_special_tokens": add_special_tokens},
            **GREEDY,
        )
        assert len(reply.choices) == len(goldens)
        for choice, golden in zip(reply.choices, goldens, strict=True):
            assert choice.model_extra["prompt_token_ids"] == golden["prompt_ids"]
            assert choice.model_extra["token_ids"] == golden["output_ids"]
            text, logprobs = golden["output_text"], golden["output_logprobs"]
            if add_special_tokens:
                assert choice.logprobs.token_logprobs[0] is golden["prompt_logprobs"][0] is None
                text, logprobs = golden["text"] + text, golden["prompt_logprobs"][1:] + logprobs
            assert choice.text == text
            assert choice.logprobs.token_logprobs[-len(logprobs) :] == pytest.approx(logprobs, abs=1e-3)


def test_a_conversation_gives_the_golden_reply_streamed_or_names_the_missing_template(served: Served) -> None:
    golden = next(golden for golden in served.prompts if "messages" in golden)
    chat = {"messages": golden["messages"], "stream": True, "stream_options": {"include_usage": True}} | GREEDY
    if not served.has_chat_template:
        with pytest.raises(openai.BadRequestError, match="chat template"):
            served.client.chat.completions.create(extra_body=EXTRA, **chat)
        return
    chunks = list(served.client.chat.completions.create(extra_body=EXTRA, **chat))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == golden["output_text"]
    assert chunks[-1].usage.prompt_tokens == len(golden["prompt_ids"])
