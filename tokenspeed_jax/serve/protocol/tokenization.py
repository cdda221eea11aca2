"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from typing import Any

import msgspec

from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.conversation import ChatMessage, render_chat
from tokenspeed_jax.serve.protocol.logprobs import TokenNames
from tokenspeed_jax.serve.protocol.tools import Tool, offered_tools
from tokenspeed_jax.serve.served_engine import ServedTokenizer


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text (`prompt`) or a conversation (`messages`), never both.

    `add_special_tokens` is true for a text and false for a conversation unless given.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def reply(self, tokenizer: ServedTokenizer, names: TokenNames, max_model_len: int) -> dict[str, Any]:
        """The token ids of the text. Raises `ApiError` when it cannot be made."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("send either prompt or messages", param="prompt", code="invalid_value")
        if self.messages is not None:
            text = render_chat(
                tokenizer,
                self.messages,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=bool(self.continue_final_message),
                tools=offered_tools(self.tools, None),
                variables=self.chat_template_kwargs,
            )
            special = bool(self.add_special_tokens)
        else:
            for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise ApiError(f"{name} needs messages", param=name, code="invalid_value")
            text = self.prompt or ""
            special = True if self.add_special_tokens is None else self.add_special_tokens
        tokens = tokenizer.encode(text, special)
        strings = [names.of(token)[0] for token in tokens] if self.return_token_strs else None
        return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": strings}


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Token ids whose text, special tokens included, is wanted."""

    model: str | None = None
    tokens: list[int]

    def reply(self, tokenizer: ServedTokenizer) -> dict[str, Any]:
        """The text. Raises `ApiError` for an id outside the tokenizer's vocabulary."""
        for index, token in enumerate(self.tokens):
            if not 0 <= token < tokenizer.vocab_size:
                raise ApiError(
                    f"tokens[{index}] must lie in [0, {tokenizer.vocab_size - 1}], got {token}",
                    param="tokens",
                    code="invalid_value",
                )
        return {"prompt": tokenizer.decode(self.tokens, skip_special_tokens=False)}
