"""A `tokenizer.json` and `tokenizer_config.json` from GGUF metadata.

llama.cpp names two models of tokenizer: "gpt2" is byte-level BPE, whose merges are stored and whose way of cutting text
into words is known by a name (`tokenizer.ggml.pre`); "llama" is SentencePiece BPE, whose merges follow from scores.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.text.tokenizer import TokenizerFiles

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types that matter here
_SPACE = "\u2581"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By `tokenizer.ggml.pre`: text is cut by each expression in turn.
_WORDS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_MODERN_WORDS.format(digits=r"\p{N}{1,3}"),),
    "qwen2": (_MODERN_WORDS.format(digits=r"\p{N}"),),
}
_COMPOSED = ("qwen2",)  # text is brought to NFC first
_WHOLE_WORDS_FIRST = ("llama-bpe",)  # a word that is a token is one, whatever the merges say


def gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """The tokenizer files that the model would have; raises `CheckpointError` naming the kind that is not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata)
    else:
        raise CheckpointError(f"GGUF: tokenizer.ggml.model {kind!r} is not supported (supported: gpt2, llama)")
    return TokenizerFiles(json.dumps(tokenizer), _tokenizer_config(metadata))


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config = {
        f"{name}_token": tokens[metadata[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    words = metadata.get("tokenizer.ggml.pre", "default")
    if words not in _WORDS:
        raise CheckpointError(
            f"GGUF: tokenizer.ggml.pre {words!r} is not supported (supported: {', '.join(sorted(_WORDS))})"
        )
    if "tokenizer.ggml.merges" not in metadata:
        raise CheckpointError("GGUF: no tokenizer.ggml.merges")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _WORDS[words]
    ]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _tokenizer(
        metadata,
        model={
            "ignore_merges": words in _WHOLE_WORDS_FIRST,
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
        normalizer={"type": "NFC"} if words in _COMPOSED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, as_bytes]},
        decoder=as_bytes,
        add_bos=words in _WHOLE_WORDS_FIRST,
    )


def _sentence_piece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_pieces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    to_text: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        to_pieces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        metadata,
        model={
            "unk_token": tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": merges_by_score(
                tokens, metadata["tokenizer.ggml.token_type"], metadata.get("tokenizer.ggml.scores", ())
            ),
        },
        normalizer={"type": "Sequence", "normalizers": to_pieces},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": to_text},
        add_bos=True,
    )


def merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, first ones first.

    SentencePiece joins the neighbours whose union scores best, so a merge ranks as its result does; of the ways to cut
    one result in two, the longest left part comes first.
    """
    if len(scores) != len(tokens):
        raise CheckpointError(f"GGUF: {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens")
    ordinary = [token_id for token_id, kind in enumerate(types) if kind == _NORMAL]
    known = {tokens[token_id] for token_id in ordinary}
    ordinary.sort(key=lambda token_id: -scores[token_id])
    return [
        (token[:cut], token[cut:])
        for token in (tokens[token_id] for token_id in ordinary)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _tokenizer(
    metadata: Mapping[str, Any],
    *,
    model: dict[str, Any],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    add_bos: bool,
) -> dict[str, Any]:
    """What both kinds share; `add_bos` is what llama.cpp does when the file does not say."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token_id, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    base = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    base |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _around(metadata, add_bos),
        "decoder": decoder,
        "model": {"type": "BPE", **base, **model, "vocab": vocabulary},
    }


def _around(metadata: Mapping[str, Any], add_bos: bool) -> dict[str, Any] | None:
    """The template that puts begin and end tokens around a sequence."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    used = {}
    for name, wanted in names.items():
        if wanted:
            if f"tokenizer.ggml.{name}_token_id" not in metadata:
                raise CheckpointError(f"GGUF: an {name} token is to be added, but there is no {name}_token_id")
            used[name] = metadata[f"tokenizer.ggml.{name}_token_id"]
    if not used:
        return None

    def sequence(letter: str, type_id: int) -> list[dict[str, Any]]:
        def mark(name: str) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": tokens[used[name]], "type_id": type_id}}] if name in used else []

        return [*mark("bos"), {"Sequence": {"id": letter, "type_id": type_id}}, *mark("eos")]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            tokens[token_id]: {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
            for token_id in used.values()
        },
    }
