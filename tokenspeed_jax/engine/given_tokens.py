"""What `Engine.score` is asked for: sequences of tokens, and which part of each is to be scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.engine.outputs import RequestOutput
from tokenspeed_jax.engine.prompts import Prompt, as_token_ids
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.validation import check_sampling, check_tokens
from tokenspeed_jax.errors import EngineClosed, InvalidRequest
from tokenspeed_jax.text import Tokenizer

ScoreMethod = Literal["plain", "paged"]
"""`plain`: a forward pass without a cache. `paged`: the steps that prefill prompts."""

Scores = list[list[float | None]]
"""Of whole sequences; None for the first token of each."""

PREFILL_ALONE = SamplingParams(max_tokens=0, prompt_logprobs=0)
"""The request whose prompt logprobs are the scores of the paged method."""


@dataclass(frozen=True)
class GivenTokens:
    """Checked sequences to be scored.

    Attributes:
        sequences: each prompt with its completion.
        prompt_lengths: how many tokens of each sequence are its prompt; 0 for a single sequence without one.
    """

    sequences: list[list[int]]
    prompt_lengths: list[int]
    method: ScoreMethod

    @classmethod
    def of(
        cls,
        prompts: Sequence[int] | Sequence[Prompt],
        completions: Sequence[Sequence[int]] | None,
        method: ScoreMethod,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
    ) -> Self:
        """One sequence per prompt and its completion, or, without completions, the one whose ids are given.

        Raises:
            InvalidRequest: numbers of prompts and completions that differ, an empty prompt, ids outside of the
                vocabulary, more tokens than `max_model_len` (one less for "paged", which draws a token), or an unknown
                method.
        """
        if method not in get_args(ScoreMethod):
            raise InvalidRequest(f"method must be plain or paged, got {method!r}", parameter="method")
        if completions is None:
            given = cls([list(cast("Sequence[int]", prompts))], [0], method)
        else:
            given = cls._joined(cast("Sequence[Prompt]", prompts), completions, method, tokenizer, limits)
        for sequence in given.sequences:
            check_tokens(sequence, limits)
            if method == "paged":
                check_sampling(sequence, PREFILL_ALONE, limits, ())
        return given

    @classmethod
    def _joined(
        cls,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        method: ScoreMethod,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
    ) -> Self:
        if isinstance(prompts, str) or len(prompts) != len(completions):
            raise InvalidRequest(
                f"completions must be one per prompt, got {len(completions)} for {len(prompts)}",
                parameter="completions",
            )
        token_ids = [as_token_ids(prompt, tokenizer) for prompt in prompts]
        for prompt in token_ids:
            check_tokens(prompt, limits)
        sequences = [[*prompt, *completion] for prompt, completion in zip(token_ids, completions, strict=True)]
        return cls(sequences, [len(prompt) for prompt in token_ids], method)

    def scored_by(
        self, plain: Callable[[list[list[int]]], Scores], generate: Callable[..., list[RequestOutput]]
    ) -> Scores:
        """The scores of all sequences.

        Args:
            plain: scores whole sequences without a cache.
            generate: `Engine.generate`.

        Raises:
            EngineClosed: the engine ended meanwhile.
        """
        if self.method == "plain":
            return plain(self.sequences)
        return _prompt_scores(generate(self.sequences, PREFILL_ALONE))

    def of_completions(self, whole: Scores) -> list[list[float]]:
        """Each completion's part of its sequence's scores; a prompt has at least the token that has no score."""
        parts = zip(whole, self.prompt_lengths, strict=True)
        return [[score for score in row[length:] if score is not None] for row, length in parts]


def _prompt_scores(outputs: list[RequestOutput]) -> Scores:
    """Of all tokens of sequences that were prompts. Raises `EngineClosed` if one of them was aborted."""
    scores = []
    for output in outputs:
        if output.prompt_logprobs is None:
            raise EngineClosed("scoring was aborted before its tokens were computed")
        scores.append(output.prompt_logprobs.token_logprobs())
    return scores
