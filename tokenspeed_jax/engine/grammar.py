"""Where one sample is in the grammar that constrains it. llguidance does the parsing."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenspeed_jax.text import Tokenizer

if TYPE_CHECKING:
    import llguidance

_MAX_MESSAGE = 600
_LEAST_FORCED = 2
"""Of a single forced token there is nothing to gain: the step that would draw it runs anyway."""


def shortened(message: str) -> str:
    """An error message of llguidance, which may quote a whole grammar."""
    message = message.replace("<non-verbose/>", "").strip()
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."


class FrontPart:
    """The unconstrained part of a sample's text, up to and including a mark that ends in a special token."""

    def __init__(self, mark: str, last_id: int, tokenizer: Tokenizer) -> None:
        self._mark = mark
        self._last_id = last_id
        self._tokenizer = tokenizer
        self._tail: deque[int] = deque(maxlen=len(mark.encode()) + 1)

    def ends_with(self, token: int) -> bool:
        """Takes the next token; whether the part ends with it."""
        self._tail.append(token)
        if token != self._last_id:
            return False
        return self._tokenizer.decode(list(self._tail), skip_special_tokens=False).endswith(self._mark)


@dataclass
class GrammarCost:
    """Whether a grammar has stopped the step loop for long and then failed: it does so once.

    Attributes:
        error: llguidance's, of a mask that took too long; None as long as there was none.
    """

    error: str | None = None


class Matcher:
    """Where one sample is in its grammar. Not thread-safe; owned by the step loop once the sample is submitted.

    Attributes:
        inner: llguidance's own state; it has not seen the tokens of the front part.
        front: the unconstrained part, as long as it goes on.
        cost: shared by all samples of the grammar.
        is_complete: the end of the grammar was drawn.
        error: why the grammar cannot go on; None as long as it can.
    """

    def __init__(
        self,
        inner: "llguidance.LLMatcher",
        front: FrontPart | None,
        eos_token_ids: Collection[int],
        cost: "GrammarCost",
    ) -> None:
        self.inner = inner
        self.front = front
        self.cost = cost
        self.is_complete = False
        self.error: str | None = None
        self._eos_token_ids = eos_token_ids

    def accept(self, token: int) -> bool:
        """Takes the sample's next token. False, with `error` set, when the grammar cannot go on with it."""
        if self.error is not None:
            return False
        if self.front is not None:
            if self.front.ends_with(token):
                self.front = None
            return True
        if not self.inner.consume_token(token):
            self.note_error()
            return False
        self.is_complete = token in self._eos_token_ids and self.inner.is_stopped()
        return True

    def take_forced(self) -> list[int]:
        """Takes the tokens that must follow, where they are two or more; otherwise nothing, and returns nothing.

        They are how the tokenizer would spell the forced text, as far as what follows cannot change that. Empty, with
        `error` set, when the grammar cannot go on.
        """
        if self.error is not None or self.front is not None or self.is_complete:
            return []
        tokens = self.inner.compute_ff_tokens()
        if len(tokens) < _LEAST_FORCED:
            return []
        if not self.inner.consume_tokens(tokens):
            self.note_error()
            return []
        return tokens

    def note_error(self) -> None:
        """Takes llguidance's error over, if it has one."""
        if self.inner.is_error():
            self.error = f"grammar: {shortened(self.inner.get_error())}"


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar.

    Attributes:
        prototype: at the grammar's beginning; copied for every sample.
        mark: what the unconstrained part ends with and its last id, where the grammar itself does not say so.
    """

    prototype: "llguidance.LLMatcher"
    mark: tuple[str, int] | None
    tokenizer: Tokenizer
    eos_token_ids: Collection[int]
    cost: GrammarCost = field(default_factory=GrammarCost)

    def matcher(self) -> Matcher:
        """A sample's own state, at the beginning."""
        front = None if self.mark is None else FrontPart(*self.mark, self.tokenizer)
        return Matcher(self.prototype.deep_copy(), front, self.eos_token_ids, self.cost)
