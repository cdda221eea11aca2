"""Functions that a test compiles as a whole: called as they are, each of their operations is a program of its own."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def one_program(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`function` with the arguments given here, compiled for the others; rounded where it says so and only there."""
    return jax.jit(functools.partial(function, **static), compiler_options={"xla_allow_excess_precision": False})
