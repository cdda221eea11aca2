"""The arrays that a model computes with, and what a trainer's parameters have to be to take their place."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from jax.core import Tracer

from tokenspeed_jax.errors import WeightUpdateError
from tokenspeed_jax.models.weight_map import WeightRule, same
from tokenspeed_jax.weights.loader import HEAD, is_ignorable

Path = tuple[str | int, ...]
GivenArray = jax.Array | np.ndarray

_LISTED = 10
_NUMBERED = re.compile(r"(.+)_(\d+)")


@dataclass(frozen=True)
class Parameter:
    """One array of a model: where it stands in the nnx state, and what it must be for the compiled steps."""

    path: Path
    shape: tuple[int, ...]
    dtype: jnp.dtype
    sharding: jax.sharding.Sharding

    @property
    def name(self) -> str:
        """The path as text, such as `layers.0.mlp.down.weight`."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True)
class Assignment:
    """What a parameter is to be made of: arrays of the caller, under the names that the caller gave them."""

    parameter: Parameter
    rule: WeightRule
    names: tuple[str, ...]
    parts: tuple[GivenArray, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the one array given is the parameter but for its dtype and place."""
        return len(self.parts) == 1 and self.rule.join is None


@dataclass(frozen=True)
class ParameterLayout:
    """All parameters of one model.

    Attributes:
        parameters: in the order of the leaves of the model's nnx state.
        rules: how each is made of a Hugging Face checkpoint's tensors; empty for a model without such names.
        ignored: beginnings of Hugging Face names that may be given without being needed.
    """

    parameters: tuple[Parameter, ...]
    rules: Mapping[Path, WeightRule]
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> Self:
        """The layout of a model whose arrays exist."""
        leaves, tree = jax.tree.flatten(nnx.state(model))
        # The numbers of the leaves, in place of them, say which path each has.
        numbered = dict(nnx.to_flat_state(jax.tree.unflatten(tree, range(len(leaves)))))
        paths: dict[int, Any] = {variable.get_value(): path for path, variable in numbered.items()}
        parameters = tuple(
            Parameter(paths[index], leaf.shape, leaf.dtype, leaf.sharding) for index, leaf in enumerate(leaves)
        )
        weight_map = getattr(type(model), "weight_map", None)
        if weight_map is None:
            return cls(parameters, {}, ())
        config = model.config
        ignored = getattr(type(model), "ignored_tensors", lambda _: ())(config)
        if config.tie_word_embeddings:
            ignored = (*ignored, HEAD)
        return cls(parameters, {rule.parameter: rule for rule in weight_map(config)}, ignored)

    def assign(self, params: Any) -> tuple[Assignment, ...]:
        """Finds every parameter's arrays in what a caller gave, and checks them without reading a value.

        Args:
            params: an `nnx.State` or module, a nested dict of the same paths (flax's pure or linen dicts, in a
                "params" collection or not), or a flat dict of Hugging Face names.

        Returns:
            One assignment per parameter, in order.

        Raises:
            WeightUpdateError: names are missing or unknown, or arrays have another shape, no floating-point dtype, or
                were deleted; the message names all of them.
        """
        if isinstance(params, Mapping) and params and not any(isinstance(v, Mapping) for v in params.values()):
            assignments, unknown = self._by_checkpoint_name(dict(params))
        else:
            assignments, unknown = self._by_path(params)
        problems: list[tuple[str, str]] = [("unknown", name) for name in unknown]
        found = []
        for parameter, rule, names, parts in assignments:
            wanted = rule.shapes(parameter.shape)
            faults = [
                fault
                for name, part, shape in zip(names, parts, wanted, strict=True)
                if (fault := _fault(name, part, shape, rule.tensor_dtype)) is not None
            ]
            problems += faults
            if not faults:
                found.append(Assignment(parameter, rule, names, tuple(part for part in parts if part is not None)))
        if problems:
            raise _refusal(problems)
        return tuple(found)

    def _by_path(self, params: Any) -> tuple[list[tuple[Parameter, WeightRule, tuple[str], tuple[Any]]], list[str]]:
        given = {_canonical(path): (path, leaf) for path, leaf in _leaves(params)}
        assignments = []
        for parameter in self.parameters:
            path, leaf = given.pop(_canonical(parameter.path), (parameter.path, None))
            name = ".".join(map(str, path))
            assignments.append((parameter, same(parameter.path, name), (name,), (leaf,)))
        return assignments, [".".join(map(str, path)) for path, _ in given.values()]

    def _by_checkpoint_name(
        self, params: dict[str, Any]
    ) -> tuple[list[tuple[Parameter, WeightRule, tuple[str, ...], tuple[Any, ...]]], list[str]]:
        if not self.rules:
            raise WeightUpdateError("this model has no Hugging Face names: give params as nested dicts of its own")
        assignments = []
        for parameter in self.parameters:
            rule = self.rules[parameter.path]
            assignments.append((parameter, rule, rule.tensors, tuple(params.get(name) for name in rule.tensors)))
        needed = {name for rule in self.rules.values() for name in rule.tensors}
        return assignments, [
            str(name) for name in params if name not in needed and not is_ignorable(str(name), self.ignored)
        ]


def _leaves(params: Any) -> Iterator[tuple[Path, Any]]:
    """The arrays of a state or nested dict, with their paths."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    if not isinstance(params, Mapping):
        raise WeightUpdateError(
            f"params must be an nnx.State, a nested dict or a dict of Hugging Face names, got {type(params).__name__}",
            parameter="params",
        )
    if set(params) == {"params"} and isinstance(params["params"], Mapping):
        params = params["params"]
    yield from _descend((), params)


def _descend(path: Path, tree: Mapping[Any, Any]) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _descend((*path, key), value)
        else:
            yield (*path, key), _unboxed(value)


def _unboxed(value: Any) -> Any:
    """An array out of a variable of nnx or a box of linen."""
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    return value.unbox() if isinstance(value, meta.AxisMetadata) else value


def _canonical(path: Path) -> tuple[str, ...]:
    """One spelling of a path: nnx numbers a list's items by integers, a state dict by "0", linen by `layers_0`."""
    parts: list[str] = []
    for part in map(str, path):
        numbered = _NUMBERED.fullmatch(part)
        parts += numbered.groups() if numbered else (part,)
    return tuple(parts)


def _fault(name: str, part: Any, shape: tuple[int, ...], tensor_dtype: str | None) -> tuple[str, str] | None:
    """What is wrong with a given array, as (kind, text), or None."""
    if part is None:
        return "missing", name
    if not isinstance(part, (jax.Array, np.ndarray)) or isinstance(part, Tracer):
        return "no arrays", f"{name} ({type(part).__name__})"
    if isinstance(part, jax.Array) and part.is_deleted():
        return "deleted or donated", name
    if tuple(part.shape) != tuple(shape):
        return "of the wrong shape", f"{name} {tuple(part.shape)} where {tuple(shape)} is expected"
    if tensor_dtype is None and not jnp.issubdtype(part.dtype, jnp.floating):
        return "not floating-point", f"{name} ({part.dtype})"
    if tensor_dtype is not None and part.dtype != tensor_dtype:
        return "of the wrong dtype", f"{name} {part.dtype} where {tensor_dtype} is expected"
    return None


def _refusal(problems: list[tuple[str, str]]) -> WeightUpdateError:
    kinds: dict[str, list[str]] = {}
    for kind, text in problems:
        kinds.setdefault(kind, []).append(text)
    parts = [
        f"{len(texts)} {kind}: {', '.join(texts[:_LISTED])}{', ...' if len(texts) > _LISTED else ''}"
        for kind, texts in kinds.items()
    ]
    first = problems[0][1].split(" ")[0]
    return WeightUpdateError(f"the parameters do not fit the model: {'; '.join(parts)}", parameter=first)
