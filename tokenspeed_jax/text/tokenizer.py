"""A checkpoint's tokenizer: text to token ids and back, and its chat template."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tokenspeed_jax.errors import CheckpointError, InvalidRequest
from tokenspeed_jax.text.chat_template import ChatTemplate, template_source
from tokenspeed_jax.text.piece_decoder import PieceStream, stream_factory

_SPECIAL_TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What a checkpoint says about its tokenizer, parsed.

    Attributes:
        tokenizer_json: text of `tokenizer.json`.
        tokenizer_config: `tokenizer_config.json`.
        chat_template: text of `chat_template.jinja`, which wins over the configuration's entry; None without it.
    """

    tokenizer_json: str
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles":
        """Reads a checkpoint folder; `tokenizer.json` must be there."""
        template, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        try:
            tokenizer_config = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
            return cls(
                tokenizer_json=(folder / "tokenizer.json").read_text(encoding="utf-8"),
                tokenizer_config=tokenizer_config,
                chat_template=template.read_text(encoding="utf-8") if template.exists() else None,
            )
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} has no tokenizer.json") from error
        except ValueError as error:
            raise CheckpointError(f"{settings} is not JSON: {error}") from error


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: number of tokens, added ones included; a model's own `vocab_size` may be padded beyond it.
        bos_token_id: begin-of-sequence token, None without one.
        eos_token_ids: tokens that end a reply: those of `generation_config.json`, else of `config.json`, else the
            tokenizer's own; empty when none is named.
        special_ids: tokens that `decode` skips by default.
        has_chat_template: whether `apply_chat_template` can be called.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        hf_config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Builds the tokenizer; raises `CheckpointError` when a file does not make sense."""
        try:
            self._backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
        # A file saved by a training run may carry that run's truncation and padding.
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = self._backend.decoder
        self._new_stream = stream_factory(None if decoder is None else json.loads(decoder.__getstate__()))

        special = _special_tokens(files.tokenizer_config)
        added = self._backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        sources = ((generation_config or {}), (hf_config or {}))
        bos, eos = self._token_id(special, "bos"), self._token_id(special, "eos")
        self.bos_token_id = next(iter(_configured_ids(sources, "bos_token_id")), bos)
        self.eos_token_ids = _configured_ids(sources, "eos_token_id") or (() if eos is None else (eos,))
        source = template_source(files.tokenizer_config, files.chat_template)
        self._chat_template = None if source is None else ChatTemplate(source, special)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it become their ids.

        Args:
            add_special_tokens: add what the checkpoint puts around a sequence, such as a begin-of-sequence token;
                false for text from a chat template, which holds it already.

        Raises:
            InvalidRequest: the text has lone surrogates, which no UTF-8 can spell.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}", parameter="prompt") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> str | None:
        """A token's entry in the vocabulary; None for one that decoding drops."""
        if skip_special_tokens and token_id in self.special_ids:
            return None
        return self._backend.id_to_token(token_id)

    def token_ids(self) -> list[int]:
        """The ids of all tokens, in no order; there may be holes between them."""
        return list(self._backend.get_vocab(with_added_tokens=True).values())

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return self._backend.to_str()

    def piece_stream(self) -> PieceStream:
        """A fresh incremental decoder of pieces, see `Detokenizer`."""
        return self._new_stream()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text for a conversation.

        Raises:
            InvalidRequest: the checkpoint has no chat template, or its template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest("this checkpoint has no chat template; send a text prompt", parameter="messages")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def chat_template_mentions(self, variable: str) -> bool:
        """Whether the chat template may use a variable such as `tools`; False without a template."""
        return self._chat_template is not None and self._chat_template.mentions(variable)

    def added_id(self, text: str) -> int | None:
        """The id of the token that was added to the vocabulary as this text, special or not; None without one."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def _token_id(self, special: Mapping[str, str], name: str) -> int | None:
        token = special.get(f"{name}_token")
        return None if token is None else self._backend.token_to_id(token)


def _configured_ids(sources: Sequence[Mapping[str, Any]], field: str) -> tuple[int, ...]:
    """The ids of the first source that gives any; a source writes one id or a list."""
    for source in sources:
        match source.get(field):
            case int(token_id):
                return (token_id,)
            case [*ids] if ids:
                return tuple(ids)
    return ()


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Names such as `bos_token` and their text; an entry is the text itself or a dictionary around it."""
    found = {}
    for field in _SPECIAL_TOKEN_FIELDS:
        value = tokenizer_config.get(field)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[field] = value
    return found
