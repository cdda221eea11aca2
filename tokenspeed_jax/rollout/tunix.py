"""`TokenSpeedRollout`: the engine as a rollout worker of Tunix's trainers. Needs `google-tunix`.

ClusterConfig(rollout_engine=functools.partial(TokenSpeedRollout, engine_config=EngineConfig(model="PATH")), ...)
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]: the extra `tunix`
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.engine import Engine
from tokenspeed_jax.engine.outputs import Sample
from tokenspeed_jax.engine.sampling_params import MAX_N, SamplingParams
from tokenspeed_jax.errors import ConfigError, InvalidRequest
from tokenspeed_jax.rollout.padded_model import PaddedModel, with_own_variables
from tokenspeed_jax.rollout.tunix_weights import hf_tensors

_LARGEST_SEED = (1 << 63) - 1


class TunixTokenizer(Protocol):
    """The part of Tunix's `TokenizerAdapter` that is called."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def bos_id(self) -> int | None: ...

    def eos_id(self) -> int: ...

    def pad_id(self) -> int: ...

    def dedup_bos_ids(self, ids: list[int]) -> list[int]: ...


class TokenSpeedRollout(BaseRollout):
    """Samples with an `Engine`, whose weights Tunix replaces as it trains.

    The actor is a `PaddedModel`, whose arrays the engine then uses as they are, or a model of Tunix's own, of which
    the engine loads the checkpoint `engine_config.model` and takes the parameters under Hugging Face's names.

    Attributes:
        engine: the engine; `close` ends it.
        config: Tunix's configuration.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: TunixTokenizer,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        engine_config: EngineConfig,
        to_engine: Callable[[nnx.State], Any] = hf_tensors,
    ) -> None:
        """All but the last two are Tunix's to give.

        Args:
            to_engine: makes of the actor's parameters what `Engine.update_weights` takes; the default knows Tunix's
                Llama 3 and dense Qwen 3. Has no part in it when the actor is a `PaddedModel`.

        Raises:
            ConfigError: the rollout's mesh has several devices, or the configuration asks for what is not served.
            CheckpointError, OutOfDeviceMemory: as of `Engine`.
        """
        _check_config(rollout_config, mesh)
        self.config = rollout_config
        self._tokenizer = tokenizer
        self._to_engine = to_engine
        if isinstance(rollout_actor, PaddedModel):
            self._template = rollout_actor
            self.engine = Engine.from_model(rollout_actor.model, engine_config)
        else:
            self._template = None
            self.engine = Engine(engine_config)
        try:
            self._check_length()
            if self._template is None:
                self.update_params(nnx.state(rollout_actor, nnx.Param))
        except BaseException:
            self.close()
            raise

    def _check_length(self) -> None:
        config, limit = self.config, self.engine.max_model_len
        if config.max_prompt_length + config.max_tokens_to_generate > limit:
            raise ConfigError(
                f"max_prompt_length {config.max_prompt_length} + max_tokens_to_generate "
                f"{config.max_tokens_to_generate} are more than {limit}, the engine's max_model_len",
                field="max_tokens_to_generate",
            )

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Samples once for every prompt. Equal prompts in a row are computed once.

        Returns:
            Tokens with the one that ended them, texts without it; log-probabilities, where the configuration asks for
            them, under the distribution that was drawn from, and at temperature 0 under the model. No logits.

        Raises:
            InvalidRequest: an argument beyond these, or a prompt and output longer than the engine serves.
        """
        if kwargs:
            name = next(iter(kwargs))
            raise InvalidRequest(f"{name} is not served by TokenSpeedRollout.generate", parameter=name)
        token_ids = [self._encoded(prompt) for prompt in prompts]
        groups = _runs(token_ids)
        eos = tuple(rollout_config.eos_tokens or (self.eos_id(),))
        each = _sampling(rollout_config, eos, [count for _, count in groups])
        outputs = self.engine.generate([ids for ids, _ in groups], each)
        samples = [sample for output in outputs for sample in output.samples]
        return RolloutOutput(
            text=[self._text(sample, eos) for sample in samples],
            logits=None,  # pyright: ignore[reportArgumentType]: as Tunix's other engines have it
            tokens=[np.array(sample.token_ids, np.int32) for sample in samples],
            left_padded_prompt_tokens=self._left_padded(token_ids, rollout_config.max_prompt_length),
            logprobs=[_logprobs(sample, rollout_config) for sample in samples]
            if rollout_config.return_logprobs
            else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "rows prompt"], completion_tokens: Int[Array, "rows completion"]
    ) -> Float[Array, "rows completion"]:
        """Log-probabilities of completions under the weights that are served, before temperature; 0 for padding."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        texts = [
            (_without_padding(prompt, self.pad_id(), left=True), _without_padding(rest, self.pad_id(), left=False))
            for prompt, rest in zip(prompts, completions, strict=True)
        ]
        outputs = self.engine.generate(
            [[*prompt, *rest] for prompt, rest in texts], SamplingParams(max_tokens=0, prompt_logprobs=0)
        )
        logps = np.zeros(completions.shape, np.float32)
        for row, output, (_, rest) in zip(logps, outputs, texts, strict=True):
            if rest:
                assert output.prompt_logprobs is not None
                row[: len(rest)] = output.prompt_logprobs.token_logprobs()[-len(rest) :]
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Serves these parameters from now on, as the next version; waits for what runs.

        Raises:
            InvalidRequest: parameters of LoRA adapters, or such as do not fit the model; the old ones are served.
        """
        if nnx.LoRAParam in (filter_types or ()):
            raise InvalidRequest("LoRA adapters are not served: train all parameters", parameter="filter_types")
        given = params["model"] if self._template is not None else self._to_engine(params)
        self.engine.update_weights(given, version=self.engine.weight_version + 1)

    def pad_id(self) -> int:
        """The tokenizer's id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's id of the end of a sequence."""
        return self._tokenizer.eos_id()

    def model(self) -> PaddedModel | None:
        """The model that is served, with variables of its own over the engine's memory; None where the actor is a
        model of Tunix's, as with Tunix's other engines."""
        if self._template is None:
            return None
        parameters = self.engine.export_weights("nnx")
        assert isinstance(parameters, nnx.State)
        return with_own_variables(self._template, parameters)

    def close(self) -> None:
        """Ends the engine and frees its memory."""
        self.engine.close()

    def _encoded(self, prompt: str) -> list[int]:
        """A prompt's token ids, as Tunix's other engines make them."""
        bos = self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids([*([bos] if bos else []), *self._tokenizer.encode(prompt)])

    def _text(self, sample: Sample, eos: Sequence[int]) -> str:
        ids = sample.token_ids
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in eos else ids)

    def _left_padded(self, token_ids: Sequence[Sequence[int]], width: int) -> np.ndarray:
        longest = max(map(len, token_ids))
        if longest > width:
            width = 1 << (longest - 1).bit_length()
        padded = np.full((len(token_ids), width), self.pad_id(), np.int32)
        for row, ids in zip(padded, token_ids, strict=True):
            row[width - len(ids) :] = ids
        return padded


def _check_config(config: RolloutConfig, mesh: jax.sharding.Mesh) -> None:
    """Refuses what would have no effect. Fields that carry another engine's name are that engine's affair."""
    if mesh.size > 1:
        raise ConfigError(f"the rollout's mesh has {mesh.size} devices; an engine serves on one", field="role_to_mesh")
    for name in ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size"):
        if getattr(config, name) not in (-1, 1):
            raise ConfigError(
                f"{name} must be 1, got {getattr(config, name)}: an engine serves on one device", field=name
            )
    if config.rollout_mapping_config is not None:
        raise ConfigError("rollout_mapping_config has no effect: give to_engine", field="rollout_mapping_config")
    if config.data_type is not None:
        raise ConfigError("data_type has no effect: give dtype in engine_config", field="data_type")


def _runs(prompts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Equal prompts in a row, and how many of them; no run is longer than the samples of one request."""
    runs: list[tuple[list[int], int]] = []
    for prompt in prompts:
        if runs and runs[-1][0] == prompt and runs[-1][1] < MAX_N:
            runs[-1] = (prompt, runs[-1][1] + 1)
        else:
            runs.append((prompt, 1))
    return runs


def _sampling(config: RolloutConfig, eos: tuple[int, ...], counts: Sequence[int]) -> list[SamplingParams]:
    """The parameters of one request for each count of samples; with a seed, each has one of its own."""
    seed = None if config.seed is None else _number(config.seed)
    top_k = config.top_k
    return [
        SamplingParams(
            n=count,
            max_tokens=config.max_tokens_to_generate,
            temperature=float(config.temperature),
            top_p=1.0 if config.top_p is None else float(config.top_p),
            top_k=0 if top_k is None or top_k == -1 else int(top_k),
            seed=None if seed is None else (seed + place) & _LARGEST_SEED,
            stop_token_ids=eos,
            ignore_eos=True,
            logprobs=config.return_logprobs,
        )
        for place, count in enumerate(counts)
    ]


def _number(seed: Any) -> int:
    """A number, or a key of JAX's, as a number."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).astype(np.uint64).ravel().tolist()
    return sum(word << (32 * place) for place, word in enumerate(reversed(words))) & _LARGEST_SEED


def _logprobs(sample: Sample, config: RolloutConfig) -> np.ndarray:
    values = sample.sampling_logprobs if config.temperature else sample.logprobs
    return np.array(values, np.float32)


def _without_padding(ids: np.ndarray, pad_id: int, *, left: bool) -> list[int]:
    """A row without its padding, which stands on one side."""
    places = np.flatnonzero(ids != pad_id)
    if not places.size:
        return []
    return ids[places[0] :].tolist() if left else ids[: places[-1] + 1].tolist()
