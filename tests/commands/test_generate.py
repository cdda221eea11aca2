"""`tokenspeed-jax generate`: text to the terminal, without a server."""

import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_jax import EngineConfig, InvalidRequest, RequestDelta, SamplingParams
from tokenspeed_jax.commands import generate
from tokenspeed_jax.commands.main import main
from tokenspeed_jax.engine.compilation_cache import default_cache_folder
from tokenspeed_jax.errors import CheckpointError, ConfigError, EngineClosed
from tokenspeed_jax.weights import open_checkpoint

TINY = Path(__file__).parents[1] / "golden" / "tiny"


class ScriptedEngine:
    """Answers every prompt with `PIECES`; remembers what it was asked."""

    PIECES = ("Hel", "lo", " you")
    configs: list[EngineConfig]
    asked: list[tuple[Any, SamplingParams]]
    error: Exception | None = None

    def __init__(self, config: EngineConfig) -> None:
        self.configs.append(config)
        if isinstance(self.error, ConfigError | CheckpointError):
            raise self.error

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None: ...

    async def stream(self, prompt: Any, params: SamplingParams) -> AsyncIterator[RequestDelta]:
        self.asked.append((json.loads(json.dumps(prompt)), params))
        if self.error is not None:
            raise self.error
        for piece in self.PIECES:
            for index in range(params.n):
                end = "length" if piece == self.PIECES[-1] else None
                yield RequestDelta("r", index, [1], 0, [2], text=piece, finish_reason=end)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedEngine]:
    fresh = type("Engine", (ScriptedEngine,), {"configs": [], "asked": []})
    monkeypatch.setattr(generate, "Engine", fresh)
    return fresh


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`typed(text)`: what standard input has."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_real_engine_writes_the_golden_reply(capsys: pytest.CaptureFixture[str]) -> None:
    golden = json.loads((TINY / "llama.json").read_text())["prompts"][0]
    tokenizer = open_checkpoint(str(TINY / "llama")).tokenizer()
    prompt = tokenizer.decode(golden["prompt_ids"], skip_special_tokens=False)
    assert tokenizer.encode(prompt) == golden["prompt_ids"], "the golden prompt can be written as text"
    options = [
        f"--model={TINY / 'llama'}", "--dtype=float32", "--max-tokens=24", "--temperature=0", "--ignore-eos",
        "--kv-cache-memory-bytes=1048576", "--max-model-len=256", "--max-num-batched-tokens=64",
        "--disable-progress-bars",
    ]  # fmt: skip
    assert main(["generate", *options, "--", prompt]) == 0
    assert capsys.readouterr().out == tokenizer.decode(golden["output_ids"]) + "\n"


def test_a_prompt_streams_and_options_reach_engine_and_sampler(
    scripted: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model=m", "Say hello", "--top-p=0.5", "--stop=a", "--stop=b", "--dtype=half"]) == 0
    assert capsys.readouterr() == ("Hello you\n", "the context is full\n")
    assert scripted.asked == [("Say hello", SamplingParams(max_tokens=None, top_p=0.5, stop=("a", "b")))]
    kept = default_cache_folder()
    assert scripted.configs == [
        EngineConfig(model="m", dtype="float16", max_num_seqs=1, warmup=False, compilation_cache_dir=kept)
    ]


def test_several_samples_come_one_after_the_other(
    scripted: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model=m", "Say hello", "--n=2", "--max-tokens=3"]) == 0
    assert capsys.readouterr() == ("[0] Hello you\n[1] Hello you\n", "")
    assert scripted.configs[0].max_num_seqs == 2


def test_without_a_prompt_standard_input_is_the_prompt(
    scripted: type[ScriptedEngine], typed: Callable[[str], None]
) -> None:
    typed("two\nlines\n")
    assert main(["generate", "--model=m"]) == 0
    assert scripted.asked[0][0] == "two\nlines\n"


def test_one_message_goes_through_the_template(scripted: type[ScriptedEngine]) -> None:
    assert main(["generate", "--model=m", "--chat", "--system-prompt=Be brief.", "Hi"]) == 0
    assert scripted.asked[0][0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_conversation_remembers_both_sides(
    scripted: type[ScriptedEngine], typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hi\n\nAnd you?\n")
    assert main(["generate", "--model=m", "--chat", "--max-tokens=3"]) == 0
    assert capsys.readouterr().out == "Hello you\nHello you\n"
    first, second = (prompt for prompt, _ in scripted.asked)
    assert first == [{"role": "user", "content": "Hi"}]
    reply = {"role": "assistant", "content": "Hello you"}
    assert second == [*first, reply, {"role": "user", "content": "And you?"}]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("max_model_len 9 is too small", field="max_model_len"), 2, "argument --context-length: max_model"),
        (CheckpointError("no such folder"), 1, "error: no such folder"),
        (InvalidRequest("prompt has 9 tokens", parameter="prompt"), 2, "error: argument PROMPT: prompt has 9 tokens"),
        (InvalidRequest("no chat template", parameter="messages"), 2, "error: no chat template"),
        (EngineClosed("the engine failed while generating"), 3, "error: the engine failed"),
        (KeyboardInterrupt(), 130, ""),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), 2, "standard input"),
    ],
)
def test_every_failure_is_one_line_and_an_exit_code(
    error: Exception, code: int, says: str, scripted: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.error = error
    try:
        ended = main(["generate", "--model=m", "--context-length=9", "Hi"])
    except SystemExit as end:
        ended = end.code
    assert ended == code
    assert says in (capsys.readouterr().err.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["Hi"], ["--model"]),
        (["--model=m", "--system-prompt=x", "Hi"], ["--system-prompt", "no effect"]),
        (["--model=m", ""], ["PROMPT", "empty"]),
        (["--model=m", "\udc80"], ["PROMPT", "Unicode"]),
        (["--model=m", "--chat", "--n=2"], ["--n", "one reply"]),
        (["--model=m", "--temperature=-1", "Hi"], ["--temperature", "-1.0"]),
        (["--model=m", "--logprobs", "Hi"], ["unknown option --logprobs"]),
        (["--model=m", "--port=1", "Hi"], ["unknown option --port"]),
        (["--model=m", '--logit-bias={"a": 1}', "Hi"], ["--logit-bias", "'a'"]),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    words: list[str], says: list[str], scripted: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["generate", *words])
    assert end.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(part in line for part in says), line
    assert scripted.configs == []
