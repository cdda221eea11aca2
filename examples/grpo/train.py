"""GRPO in one file: a tiny Llama with random weights learns to copy digits, and all it is told is a reward.

    python examples/grpo/train.py --updates 120

Every update takes the steps of the method (arXiv 2402.03300, without the KL term):

1. the engine draws a group of completions for each prompt, with the log-probability of every token;
2. a function gives each completion its reward: the share of digits that are where they should be;
3. an advantage is a reward seen from its own group: minus the group's mean, divided by its deviation;
4. the trainer's forward pass gives the log-probabilities again, with gradients, and optax moves the weights;
5. the engine gets the new weights.

The engine runs in this process, on the trainer's own model; see docs/rollouts.md.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from tokenspeed_jax import Engine, EngineConfig, RequestOutput, SamplingParams
from tokenspeed_jax.models.llama import Llama, LlamaConfig
from tokenspeed_jax.rollout import token_log_probabilities

COPY = 10
"""The token behind the digits 0 to 9 of a prompt: now say them again."""
VOCABULARY = 12


@dataclass(frozen=True)
class GrpoConfig:
    """Options of a run; the command line has the same.

    Attributes:
        updates: batches of rollouts; each is followed by new weights.
        prompts: prompts of a batch.
        group_size: completions drawn for each prompt.
        digits: how many are to be copied.
        passes: optimiser steps on each batch; from the second on the ratio differs from 1.
        clip: how far the ratio of new to old probability is followed.
        output: folder of `metrics.json` and `metrics.png`.
    """

    updates: int = 120
    prompts: int = 16
    group_size: int = 16
    digits: int = 3
    passes: int = 2
    learning_rate: float = 1e-3
    clip: float = 0.2
    seed: int = 0
    output: str = "grpo-run"


class Batch(NamedTuple):
    """What an update learns from; rows are padded behind their completions."""

    tokens: Int[Array, "rows length"]
    is_token: Float[Array, "rows length"]
    is_completion: Float[Array, "rows length"]
    old_log_probabilities: Float[Array, "rows length"]
    advantages: Float[Array, " rows"]


class Metrics(NamedTuple):
    """Of one update: the mean reward of its rollouts, and how far the trainer's log-probabilities are from theirs."""

    reward: float
    log_probability_difference: float


def tiny_llama(seed: int) -> Llama:
    """Two layers of 64 channels, in float32."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
    }
    return Llama(LlamaConfig.from_hf(config), dtype=jnp.float32, rngs=nnx.Rngs(seed))


def draw_prompts(rng: np.random.Generator, config: GrpoConfig) -> list[list[int]]:
    """Random digits, then `COPY`."""
    return [[*row, COPY] for row in rng.integers(0, 10, (config.prompts, config.digits)).tolist()]


def reward(prompt: list[int], completion: list[int]) -> float:
    """The share of the prompt's digits that the completion has in their places."""
    digits = prompt[:-1]
    return sum(a == b for a, b in zip(digits, completion, strict=False)) / len(digits)


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """[prompts, group_size] of rewards, each seen from its own group; 0 where a group's rewards are all the same."""
    deviation = rewards.std(axis=1, keepdims=True)
    return (rewards - rewards.mean(axis=1, keepdims=True)) / np.maximum(deviation, 1e-6)


def as_batch(outputs: list[RequestOutput], advantages: np.ndarray) -> Batch:
    """Prompts and completions as padded arrays, one row a sample."""
    rows = [(output.prompt_token_ids, sample) for output in outputs for sample in output.samples]
    shape = len(rows), max(len(prompt) + len(sample.token_ids) for prompt, sample in rows)
    tokens, old = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    is_token, is_completion = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, (prompt, sample) in enumerate(rows):
        begin, end = len(prompt), len(prompt) + len(sample.token_ids)
        tokens[row, :end] = [*prompt, *sample.token_ids]
        old[row, begin:end] = sample.sampling_logprobs
        is_token[row, :end] = 1
        is_completion[row, begin:end] = 1
    arrays = tokens, is_token, is_completion, old, advantages.reshape(-1).astype(np.float32)
    return Batch(*map(jnp.asarray, arrays))


def loss(model: Llama, batch: Batch, clip: float) -> tuple[jax.Array, jax.Array]:
    """The clipped objective, averaged over completion tokens, and the mean |log ratio|."""
    new = token_log_probabilities(model, batch.tokens, batch.is_token)
    log_ratio = new - batch.old_log_probabilities
    ratio = jnp.exp(log_ratio)
    advantages = batch.advantages[:, None]
    gained = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    count = batch.is_completion.sum()
    difference = (jnp.abs(log_ratio) * batch.is_completion).sum() / count
    return -(gained * batch.is_completion).sum() / count, difference


# No buffer is donated: the engine samples from the arrays that the model had at the last `update_weights`.
@nnx.jit(static_argnames="clip")
def optimise(model: Llama, optimizer: nnx.Optimizer, batch: Batch, clip: float) -> jax.Array:
    """One optimiser step; returns the mean |log ratio| before it."""
    (_, difference), gradients = nnx.value_and_grad(loss, has_aux=True)(model, batch, clip)
    optimizer.update(model, gradients)
    return difference


def train(config: GrpoConfig) -> list[Metrics]:
    """Runs the updates, with a progress bar."""
    rng = np.random.default_rng(config.seed)
    model = tiny_llama(config.seed)
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate)), wrt=nnx.Param
    )
    rows = config.prompts * config.group_size
    engine_config = EngineConfig(
        model="tiny-llama",
        seed=config.seed,
        max_num_seqs=rows,
        max_num_batched_tokens=max(64, rows),
        kv_cache_memory_bytes=64 << 20,
        warmup=False,  # few of the shapes occur
        disable_progress_bars=True,
    )
    sampling = SamplingParams(n=config.group_size, max_tokens=config.digits, ignore_eos=True, logprobs=True)
    history = []
    with (
        Engine.from_model(model, engine_config) as engine,
        tqdm(range(1, config.updates + 1), desc="GRPO", unit="update") as bar,
    ):
        for version in bar:
            outputs = engine.generate(draw_prompts(rng, config), sampling)
            rewards = np.array([[reward(o.prompt_token_ids, s.token_ids) for s in o.samples] for o in outputs])
            batch = as_batch(outputs, group_advantages(rewards))
            differences = [optimise(model, optimizer, batch, config.clip) for _ in range(config.passes)]
            engine.update_weights(nnx.state(model), version=version)
            history.append(Metrics(rewards.mean().item(), float(differences[0])))
            bar.set_postfix(reward=f"{history[-1].reward:.2f}", difference=f"{history[-1][1]:.1e}")
    return history


def plot(history: list[Metrics], path: Path) -> None:
    """Reward, and below it the difference of log-probabilities, over the updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot([item.reward for item in history])
    above.set(ylabel="mean reward", ylim=(0, 1.02), title="GRPO: copying digits")
    below.semilogy([item.log_probability_difference for item in history], color="tab:orange")
    below.set(ylabel="mean |sampler - trainer|", xlabel="update")
    below.axhline(1e-5, color="gray", linestyle=":", linewidth=1)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(GrpoConfig):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    config = GrpoConfig(**vars(parser.parse_args()))
    began = time.monotonic()
    history = train(config)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"config": asdict(config), "seconds": time.monotonic() - began, "updates": [m._asdict() for m in history]}
    (folder / "metrics.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    plot(history, folder / "metrics.png")
    print(f"reward {history[0].reward:.2f} -> {history[-1].reward:.2f}; the plot is {folder / 'metrics.png'}")


if __name__ == "__main__":
    main()
