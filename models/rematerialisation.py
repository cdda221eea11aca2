"""Layers whose inner values the backward pass computes again instead of keeping them (gradient checkpointing)."""

import operator
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tokenspeed_jax.models.attention import AttentionStep
from tokenspeed_jax.models.plain_step import PlainStep


def layer_call(
    modules: Any, step: AttentionStep, *, remat: bool, call: Callable[..., Any] = operator.call
) -> Callable[..., Any]:
    """A layer as a function of its inputs, which are arrays and pytrees of them.

    Args:
        modules: the module that has the layer's parameters, or a tuple of such.
        remat: keep only the inputs for the backward pass, and compute the rest a second time there.
        call: `call(modules, *inputs, step)` is the layer.

    Raises:
        ValueError: `remat` with a step that writes caches, which it would write twice.
    """
    if not remat:
        return lambda *inputs: call(modules, *inputs, step)
    if not isinstance(step, PlainStep):
        raise ValueError(f"remat needs a PlainStep, which writes no cache, got a {type(step).__name__}")
    graph, state = nnx.split(modules)

    @jax.checkpoint
    def again(state: Any, *inputs: Any) -> Any:
        return call(nnx.merge(graph, state), *inputs, step)

    return lambda *inputs: again(state, *inputs)
