"""`tokenspeed-jax generate`: one prompt, or a conversation, in the terminal; the engine runs in this process."""

import asyncio
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_jax.engine.compilation_cache import default_cache_folder
from tokenspeed_jax.engine.config import EngineConfig, about
from tokenspeed_jax.engine.engine import Engine
from tokenspeed_jax.engine.prompts import Prompt
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import CheckpointError, ConfigError, EngineClosed, InvalidRequest
from tokenspeed_jax.options import CommandLine, Configuration

_INTERRUPTED = 130
_ENGINE_FAILED = 3
# One request at a time needs neither a batch, nor every step compiled, nor the engine's own seed, nor a router.
_DECIDED = frozenset({"max_num_seqs", "warmup", "seed", "kv_events_config", "enable_return_routed_experts"})
# Log-probabilities and experts have no place in a stream of text; constraints are no value of one option.
_NOT_SHOWN = frozenset({"logprobs", "top_logprobs", "prompt_logprobs", "return_routed_experts", "structured_outputs"})


@dataclass(frozen=True)
class GenerateConfig:
    """What to generate from. Raises `ConfigError` for options that contradict each other."""

    prompt: str | None = field(
        default=None,
        metadata=about("the text to continue, or a message with --chat; default: standard input", section="prompt"),
    )
    chat: bool = field(
        default=False,
        metadata=about(
            "send the prompt through the checkpoint's chat template; without a prompt, hold a conversation, a line of "
            "standard input per message"
        ),
    )
    system_prompt: str | None = field(default=None, metadata=about("the system's message; needs --chat"))

    def __post_init__(self) -> None:
        if self.prompt == "":
            raise ConfigError("prompt must not be empty", field="prompt")
        for name in ("prompt", "system_prompt"):
            try:
                (getattr(self, name) or "").encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{name} must be valid Unicode", field=name) from None
        if self.system_prompt is not None and not self.chat:
            raise ConfigError("system_prompt has no effect without chat", field="system_prompt")


def run(argv: Sequence[str], prog: str) -> int:
    """Generates and streams to standard output; everything else goes to standard error.

    Returns:
        The exit code: 0; 1 for a checkpoint that cannot be used; 2 for an option or a prompt that is wrong; 3 when the
        engine failed; 130 after an interrupt.
    """
    options = CommandLine(
        prog,
        "Continue one prompt, or hold a conversation, in this terminal; no server is needed.",
        Configuration(GenerateConfig, positional="prompt"),
        Configuration(SamplingParams, section="sampling", omitted=_NOT_SHOWN, defaults={"max_tokens": None}),
        Configuration(EngineConfig, omitted=_DECIDED, defaults={"max_num_seqs": 1, "warmup": False}),
    ).parse(argv)
    task, params = options.of(GenerateConfig), options.of(SamplingParams)
    if task.chat and task.prompt is None and params.n > 1:
        options.refuse("a conversation goes on from one reply", "n")
    config = dataclasses.replace(options.of(EngineConfig), max_num_seqs=params.n)
    if config.compilation_cache_dir is None:
        config = dataclasses.replace(config, compilation_cache_dir=default_cache_folder())
    try:
        with Engine(config) as engine:
            _generate(engine, task, params)
    except ConfigError as error:
        options.refuse(str(error), error.field)
    except InvalidRequest as error:
        name = options.given.get(error.parameter or "")
        print(f"error: {f'argument {name}: ' if name else ''}{error}", file=sys.stderr)
        return 2
    except UnicodeDecodeError:
        print(f"error: standard input is not valid {sys.stdin.encoding}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except EngineClosed as error:
        print(f"error: {error}: {error.__cause__}", file=sys.stderr)
        return _ENGINE_FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _generate(engine: Engine, task: GenerateConfig, params: SamplingParams) -> None:
    history: list[Mapping[str, Any]] = []
    if task.system_prompt is not None:
        history.append({"role": "system", "content": task.system_prompt})
    if task.chat and task.prompt is None:
        _converse(engine, history, params)
        return
    if task.prompt is None and sys.stdin.isatty():
        print("the prompt, up to the end of the input (Ctrl-D):", file=sys.stderr, flush=True)
    prompt: Prompt = sys.stdin.read() if task.prompt is None else task.prompt
    if task.chat:
        prompt = [*history, {"role": "user", "content": prompt}]
    asyncio.run(_write_reply(engine, prompt, params))


def _converse(engine: Engine, history: list[Mapping[str, Any]], params: SamplingParams) -> None:
    """A message per line of standard input, until it ends."""
    # Lines are read outside the event loop, whose handler of interrupts would wait for the line.
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            history.append({"role": "user", "content": line.strip()})
            reply = asyncio.run(_write_reply(engine, history, params))
            history.append({"role": "assistant", "content": reply})


async def _write_reply(engine: Engine, prompt: Prompt, params: SamplingParams) -> str:
    """Writes what is generated, as it comes; several samples one after the other, each once it is whole.

    Returns:
        The text of the first sample.
    """
    texts = [""] * params.n
    async for delta in engine.stream(prompt, params):
        texts[delta.sample_index] += delta.text
        if params.n == 1:
            print(delta.text, end="\n" if delta.finish_reason else "", flush=True)
        elif delta.finish_reason:
            print(f"[{delta.sample_index}] {texts[delta.sample_index]}", flush=True)
        if delta.finish_reason == "length" and params.max_tokens is None:
            print("the context is full", file=sys.stderr)
    return texts[0]
