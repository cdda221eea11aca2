"""The prompts and parameters of requests in the log, for those who asked for them."""

import logging
from collections.abc import Sequence

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.served_engine import ServedTokenizer

_LOG = logging.getLogger(__name__)


class RequestLog:
    """Writes one line per prompt with `enable_log_requests`, and nothing otherwise."""

    def __init__(self, config: ServerConfig, tokenizer: ServedTokenizer) -> None:
        self._is_on = config.enable_log_requests
        self._limit = config.max_log_len
        self._tokenizer = tokenizer

    def note(self, request_id: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """One request, before it is submitted; long prompts take their time."""
        if not self._is_on:
            return
        for index, prompt in enumerate(prompts):
            # Ids that the tokenizer does not have are the engine's to refuse, and have no text.
            known = [token for token in prompt if 0 <= token < self._tokenizer.vocab_size]
            text = self._tokenizer.decode(known[: self._limit], skip_special_tokens=False)
            # As a literal: a prompt with line ends in it must not look like lines of the log.
            _LOG.info(
                "request %s, prompt %d: %r (%d tokens), %s", request_id, index, text[: self._limit], len(prompt), params
            )
