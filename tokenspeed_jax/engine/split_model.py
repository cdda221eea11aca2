"""A model taken apart for compiled programs: arrays that are arguments, and the rest, which is not."""

from dataclasses import dataclass
from typing import Any, Self

import jax
from flax import nnx
from jax.tree_util import PyTreeDef

Weights = tuple[jax.Array, ...]
"""Leaves of a model's nnx state, flat: to flatten a state of 400 arrays costs the host 0.4 ms, as long as the rest of a
step's dispatch."""


@dataclass(frozen=True)
class ModelStructure:
    """Everything of a model but its arrays."""

    graph: Any
    tree: PyTreeDef

    def module(self, weights: Weights) -> Any:
        """The model with these weights; usable inside a compiled program."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights))


@dataclass(frozen=True)
class SplitModel:
    """A model's structure and its weights."""

    structure: ModelStructure
    weights: Weights

    @classmethod
    def of(cls, model: nnx.Module) -> Self:
        """Takes a model apart; its arrays stay where they are."""
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        return cls(ModelStructure(graph, tree), tuple(leaves))
