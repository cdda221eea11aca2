"""Tunix's own GRPO trainer over the engine, where `google-tunix` is installed: the extra `tunix`."""

import functools
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax import ConfigError, EngineConfig, InvalidRequest
from tokenspeed_jax.rollout.padded_model import PaddedModel
from tokenspeed_jax.weights import load_model, open_checkpoint

pytest.importorskip("tunix", reason="the extra `tunix` is not installed")

import optax
from tunix.models.llama3 import model as tunix_llama
from tunix.models.llama3 import params as tunix_params
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from tokenspeed_jax.rollout.tunix import TokenSpeedRollout

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny" / "llama"
EOS, PAD = 1, 2
TOKENS, PROMPT = 8, 16
PROMPTS = ["hello there", "hello there", "abc"]
THETA = 1_000_000
"""Tunix 0.1.7 rotates by this, whatever its configuration says."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    for file in GOLDEN.iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": THETA, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def engine_config(checkpoint: str) -> EngineConfig:
    return EngineConfig(
        model=checkpoint, dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 22, warmup=False, disable_progress_bars=True,
    )  # fmt: skip


class Words:
    """A tokenizer in Tunix's smallest form: a token for each letter."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3 + ord(letter) for letter in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(i - 3) if i >= 3 else "?" for i in ids)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def config(**options: Any) -> RolloutConfig:
    fields = {
        "max_tokens_to_generate": TOKENS, "max_prompt_length": PROMPT, "temperature": 1.0, "top_k": -1,
        "return_logprobs": True,
    }  # fmt: skip
    return RolloutConfig(**fields | options)


def cluster_of(actor: nnx.Module, engine_config: EngineConfig, steps: int) -> RLCluster:
    return RLCluster(
        actor=actor,
        tokenizer=Words(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh()),
            rollout_engine=functools.partial(TokenSpeedRollout, engine_config=engine_config),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3), eval_every_n_steps=1000, max_steps=steps, mini_batch_size=1,
                train_micro_batch_size=1,
            ),
            rollout_config=config(),
        ),
    )  # fmt: skip


def largest_difference(cluster: RLCluster) -> float:
    """Between the log-probabilities of the sampler, of the paged path and of the trainer's own forward pass."""
    rollout = cluster.rollout
    output = rollout.generate(PROMPTS, config())
    prompts = jnp.asarray(output.left_padded_prompt_tokens)
    completions = np.full((len(PROMPTS), TOKENS), PAD, np.int32)
    is_token = np.zeros(completions.shape, bool)
    for row, mask, tokens in zip(completions, is_token, output.tokens, strict=True):
        row[: len(tokens)], mask[: len(tokens)] = tokens, True
    graph, state = nnx.split(cluster.actor_trainer.model)
    trained = common.compute_per_token_logps(graph, state, prompts, jnp.asarray(completions), pad_id=PAD, eos_id=EOS)
    paged = rollout.get_per_token_logps(prompts, jnp.asarray(completions))
    assert paged.shape == completions.shape
    sampled = np.concatenate(output.logprobs)
    return max(
        float(np.abs(np.asarray(trained)[is_token] - sampled).max()),
        float(np.abs(np.asarray(paged)[is_token] - sampled).max()),
    )


def train(cluster: RLCluster, steps: int) -> None:
    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [len(set(completion)) / 10 for completion in completions]

    learner = GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=GRPOConfig(num_generations=2, beta=0.0))
    assert learner.should_sync_weights
    learner.train([{"prompts": np.array(["hello there"])} for _ in range(steps)])


def test_the_whole_interface_is_there() -> None:
    assert not inspect.isabstract(TokenSpeedRollout)
    for name, method in inspect.getmembers(BaseRollout, inspect.isfunction):
        ours = inspect.signature(getattr(TokenSpeedRollout, name)).parameters
        if name != "__init__":
            assert list(ours) == list(inspect.signature(method).parameters), name


def test_grpo_trains_the_model_that_the_engine_samples(engine_config: EngineConfig) -> None:
    actor = PaddedModel(load_model(open_checkpoint(engine_config.model), dtype="float32", progress=False))
    cluster = cluster_of(actor, engine_config, steps=2)
    try:
        rollout = cluster.rollout
        engine = rollout.engine
        assert engine.weight_version == 0
        assert largest_difference(cluster) <= 1e-5
        train(cluster, steps=2)
        assert engine.weight_version == 2
        assert largest_difference(cluster) <= 1e-5
        trained = jax.tree.leaves(nnx.state(cluster.actor_trainer.model))
        served = jax.tree.leaves(engine.export_weights("nnx"))
        pointers = [[leaf.unsafe_buffer_pointer() for leaf in leaves] for leaves in (trained, served)]
        assert pointers[0] == pointers[1]  # no copy
        assert isinstance(rollout.model(), PaddedModel)
        check_generation(rollout)
    finally:
        cluster.rollout.close()


def check_generation(rollout: TokenSpeedRollout) -> None:
    """What the options mean, on an engine that is there."""
    output = rollout.generate(PROMPTS, config(seed=jax.random.key(3), return_logprobs=False))
    again = rollout.generate(PROMPTS, config(seed=jax.random.key(3), return_logprobs=False))
    assert output.logprobs is output.logits is None
    assert [tokens.tolist() for tokens in output.tokens] == [tokens.tolist() for tokens in again.tokens]
    assert output.tokens[0].tolist() != output.tokens[1].tolist()  # two samples of one prompt
    assert output.left_padded_prompt_tokens.shape == (3, PROMPT)
    assert output.left_padded_prompt_tokens[2].tolist() == [PAD] * 13 + Words().encode("abc")
    greedy = rollout.generate(["abc"], config(temperature=0.0))
    stopping = int(greedy.tokens[0][2])
    first = greedy.tokens[0].tolist().index(stopping)
    stopped = rollout.generate(["abc"], config(temperature=0.0, eos_tokens=[stopping]))
    assert stopped.tokens[0].tolist() == greedy.tokens[0][: first + 1].tolist()
    assert stopped.text[0] == Words().decode(greedy.tokens[0][:first])
    assert (greedy.logprobs[0] < 0).all()  # the model's, where nothing is drawn
    assert rollout.generate(["a" * 20], config()).left_padded_prompt_tokens.shape == (1, 32)
    with pytest.raises(InvalidRequest, match="multi_sampling"):
        rollout.generate(["abc"], config(), multi_sampling=2)
    with pytest.raises(InvalidRequest, match="LoRA"):
        rollout.update_params(nnx.State({}), (nnx.LoRAParam,))


def test_tunixs_own_model_is_served_under_hugging_faces_names(engine_config: EngineConfig) -> None:
    hf = json.loads((Path(engine_config.model) / "config.json").read_text())
    llama = tunix_llama.ModelConfig(
        num_layers=hf["num_hidden_layers"], vocab_size=hf["vocab_size"], embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"], num_heads=hf["num_attention_heads"], head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"], rope_theta=THETA, norm_eps=hf["rms_norm_eps"],
    )  # fmt: skip
    actor = tunix_params.create_model_from_safe_tensors(engine_config.model, llama, mesh=None, dtype=jnp.float32)
    cluster = cluster_of(actor, engine_config, steps=1)
    try:
        assert cluster.rollout.engine.weight_version == 1
        assert cluster.rollout.model() is None
        assert largest_difference(cluster) <= 1e-4
        train(cluster, steps=1)
        assert cluster.rollout.engine.weight_version == 2
        assert largest_difference(cluster) <= 1e-4
    finally:
        cluster.rollout.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"), ({"data_type": jnp.bfloat16}, "data_type"),
        ({"max_tokens_to_generate": 60}, "max_tokens_to_generate"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(engine_config: EngineConfig, options: dict, field: str) -> None:
    model = load_model(open_checkpoint(engine_config.model), dtype="float32", progress=False)
    with pytest.raises(ConfigError) as error:
        TokenSpeedRollout(
            rollout_actor=PaddedModel(model), tokenizer=Words(), mesh=mesh(), rollout_config=config(**options),
            engine_config=engine_config,
        )  # fmt: skip
    assert error.value.field == field
