"""The world of a chat template: Jinja's sandbox, with an end to how long and how large.

A template is a program out of a checkpoint that runs on what a client sent. Jinja's sandbox keeps it from reaching out;
it does not keep it from looping for days over a loop in a loop, or from making a text of a terabyte. Here every turn of
a loop and every call is a step, and there is a bound on the steps of one rendering.
"""

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MOST_STEPS = 500_000
"""Turns of loops and calls of one rendering; a conversation of a thousand messages takes some ten thousand."""
MOST_CHARACTERS = 64 * 1024 * 1024
"""Characters, or entries, of what a template makes by repetition."""
_MOST_POWER = 1024

_WIDTH = re.compile(r"[0-9]{7,}|\*")
"""In a text that formats others: a width of millions, or one that is an argument."""

_COUNTED = "counted_loop"
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""When a rendering here has to be over, in seconds that its thread has worked; waiting for the processor is no work."""


class RenderingTooLong(BaseException):
    """A rendering outlasted `brief_renderings`. No `Exception`: nobody is to take it for what the template raised."""


@contextlib.contextmanager
def brief_renderings(seconds: float) -> Iterator[None]:
    """Renderings inside the context raise `RenderingTooLong` once their thread has worked so long in it."""
    token = _deadline.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates end. Threads may render at once; each rendering begins with `begin`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = threading.local()
        self.filters[_COUNTED] = self._counted
        del self.filters["center"], self.filters["format"]  # of any width; no chat template has a use for them

    def begin(self) -> None:
        """Starts to count the steps of this thread anew."""
        self._local.steps = 0

    def step(self) -> None:
        """Counts one step; raises `jinja2.TemplateError` for one too many."""
        self._local.steps = getattr(self._local, "steps", 0) + 1
        if self._local.steps > MOST_STEPS:
            raise jinja2.TemplateError(f"it takes more than {MOST_STEPS} steps")
        deadline = _deadline.get()
        if deadline < math.inf and time.thread_time() > deadline:
            raise RenderingTooLong

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _CountLoops().visit(super()._parse(source, name, filename))

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item

    def call(self, *arguments: Any, **named: Any) -> Any:
        """A call by a template: also of macros, and of loops that call themselves."""
        self.step()
        # Jinja wraps `str.format` in a function of its own.
        text = getattr(getattr(arguments[1], "__wrapped__", arguments[1]), "__self__", None)
        if isinstance(text, str):
            _check_format(text)
            _check_size(max((value for value in arguments[2:] if isinstance(value, int)), default=0))
        return super().call(*arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operation whose result may be out of all proportion to its operands."""
        self.step()
        if operator == "*":
            for operand, times in ((left, right), (right, left)):
                if isinstance(operand, str | list | tuple) and isinstance(times, int):
                    _check_size(len(operand) * times)
        elif operator == "**" and isinstance(right, int) and abs(right) > _MOST_POWER:
            raise jinja2.TemplateError(f"a power of {right}")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)


class _CountLoops(jinja2.visitor.NodeTransformer):
    """Puts a filter that counts around what every loop goes through."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        """A loop."""
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node


def _check_format(text: str) -> None:
    if _WIDTH.search(text) and ("%" in text or "{" in text):
        raise jinja2.TemplateError("it formats a text to a width of millions")


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateError(f"it makes a text or list of more than {MOST_CHARACTERS}")
