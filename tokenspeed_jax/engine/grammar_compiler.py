"""Compiles structured outputs into grammars, on the threads that submit requests. Only here llguidance is imported."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.grammar import Grammar, shortened
from tokenspeed_jax.engine.grammar_source import grammar_source
from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import ConfigError, InvalidRequest
from tokenspeed_jax.text import Tokenizer

if TYPE_CHECKING:
    import llguidance

_LOG = logging.getLogger("tokenspeed_jax")
_MAX_KEPT = 64
"""Compiled grammars that are kept for requests to come."""

# A mask of an ordinary schema needs less than half of these; what needs more is refused, or ends on the way, after half
# a second at worst. llguidance's own limits are twice and four times as high.
_INITIAL_LEXER_FUEL = 500_000
_STEP_LEXER_FUEL = 50_000
_STEP_MAX_ITEMS = 25_000

_MAX_COMPILE_SECONDS = 20.0
"""No limit of llguidance is known to be passed for so long. A compilation cannot be stopped: it is left to itself."""
_MAX_LEFT = 2
"""Compilations that may be left to themselves at once; while there are more, nothing is compiled."""

_STACK_LOCK = threading.Lock()
_LEFT: list[Future[Any]] = []
_STACK_BYTES = 512 << 20
"""Of a thread that compiles. llguidance descends a chain of rules or references by recursion, at 10 kB a link, and a
grammar of `MAX_GRAMMAR_BYTES` may have thousands of links. Memory that is not descended into is never touched."""


class Grammars(Protocol):
    """What makes grammars of structured outputs, or says why none are served. Thread-safe.

    Attributes:
        are_served: whether `compile` can succeed.
    """

    are_served: bool

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of one constraint.

        Raises:
            InvalidRequest: naming `structured_outputs`, or the field of it that is at fault and where.
        """
        ...


class NoGrammars:
    """Refuses every constraint."""

    are_served = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Raises `InvalidRequest` with the reason."""
        del params
        raise InvalidRequest(f"structured_outputs are not served: {self._reason}", parameter="structured_outputs")


class GrammarCompiler:
    """Compiles grammars and keeps those that were used last.

    Args:
        vocab_size: of the model; ids beyond the tokenizer's are never allowed.
        eos_token_ids: ids that end a complete text.

    Raises:
        ImportError: llguidance is not installed.
        RuntimeError: it cannot read the tokenizer.
    """

    are_served = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        text = tokenizer.to_json()
        self._vocabulary = _on_a_deep_stack(
            lambda: LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        )
        self._limits = LLParserLimits(
            initial_lexer_fuel=_INITIAL_LEXER_FUEL,
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_MAX_ITEMS,
            verbose_errors=False,
        )
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """See `Grammars.compile`. Takes up to a second for a large grammar, without Python's lock."""
        with self._lock:
            grammar = self._kept.get(params)
            if grammar is not None:
                self._kept.move_to_end(params)
        if grammar is not None:
            if grammar.cost.error is not None:
                raise _refusal(params.constraint, f"cost too much before: {grammar.cost.error}")
            return grammar
        grammar = self._compiled(params)
        with self._lock:
            self._kept[params] = grammar
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compiled(self, params: StructuredOutputsParams) -> Grammar:
        text_mark, special_mark = self._mark(params.begins_after)
        try:
            source = grammar_source(params, text_mark)
            prototype, error = _on_a_deep_stack(lambda: self._prototype(source))
        except (RuntimeError, RecursionError) as failure:
            raise _refusal(params.constraint, f"cannot be compiled: {shortened(str(failure))}") from None
        if error:
            raise _refusal(params.constraint, f"cannot be compiled: {shortened(error)}")
        return Grammar(prototype, special_mark, self._tokenizer, self._eos_token_ids)

    def _prototype(self, source: str) -> tuple["llguidance.LLMatcher", str]:
        """A matcher at the beginning, and the error that it is in; empty without one."""
        from llguidance import LLMatcher

        prototype = LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)
        if not prototype.is_error():
            # What is too costly mostly shows at the first mask: better here than on the step loop.
            trial = prototype.deep_copy()
            trial.compute_bitmask()
            return prototype, trial.get_error()
        return prototype, prototype.get_error()

    def _mark(self, mark: str | None) -> tuple[str | None, tuple[str, int] | None]:
        """The end of the unconstrained part: as text, or as text that ends in a special token's id."""
        if mark is None:
            return None, None
        ids = self._tokenizer.encode(mark, add_special_tokens=False)
        is_special = [self._vocabulary.is_special_token(item) for item in ids]
        if not any(is_special):
            return mark, None
        if not is_special[-1]:
            raise _refusal("begins_after", f"has special tokens, so it must end in one, got {mark!r}")
        return None, (mark, ids[-1])


def _refusal(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.{field} {message}", parameter=f"structured_outputs.{field}")


def _on_a_deep_stack[T](function: Callable[[], T]) -> T:
    """The value of a function, from a thread in which it may descend deep.

    Raises:
        RuntimeError: for any error of the function, and when it takes too long.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # a panic of llguidance is no Exception
            answer.set_exception(RuntimeError(f"llguidance failed: {error}"))

    if sum(not left.done() for left in _LEFT) >= _MAX_LEFT:
        raise RuntimeError("grammars that take too long are still being compiled; try again later")
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="tokenspeed-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    try:
        return answer.result(_MAX_COMPILE_SECONDS)
    except TimeoutError:
        _LEFT[:] = [left for left in _LEFT if not left.done()] + [answer]
        raise RuntimeError(f"it takes more than {_MAX_COMPILE_SECONDS:.0f} seconds") from None


def grammars_of(
    config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Grammars:
    """What serves structured outputs in an engine.

    Raises:
        ConfigError: `grammar_backend` asks for llguidance, and it cannot serve here.
    """
    if config.grammar_backend == "none":
        return NoGrammars("the engine was started with grammar_backend none")
    if tokenizer is None:
        reason = "the engine has no tokenizer"
    elif not eos_token_ids:
        reason = "the model has no end-of-sequence id, which ends a complete text"
    else:
        try:
            return GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        except ImportError:
            reason = "llguidance is not installed (pip install llguidance; grammar_backend auto then uses it)"
        except RuntimeError as error:
            reason = f"the checkpoint's tokenizer cannot be read: {shortened(str(error))}"
            _LOG.warning("structured outputs are refused: %s", reason)
    if config.grammar_backend == "llguidance":
        raise ConfigError(f"grammar_backend llguidance cannot be had: {reason}", field="grammar_backend")
    return NoGrammars(reason)
