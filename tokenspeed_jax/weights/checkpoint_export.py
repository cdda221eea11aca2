"""A model's arrays under the names of a Hugging Face checkpoint: fused ones are taken apart again."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tokenspeed_jax.errors import WeightUpdateError
from tokenspeed_jax.models.weight_map import WeightRule
from tokenspeed_jax.weights.parameter_layout import ParameterLayout


def checkpoint_tensors(layout: ParameterLayout, arrays: Sequence[jax.Array]) -> dict[str, Any]:
    """The arrays as a checkpoint's tensors, in the model's dtypes; one that is a tensor as it stands is not copied.

    Raises:
        WeightUpdateError: a model without such names, or one whose tensors are quantised.
    """
    if not layout.rules:
        raise WeightUpdateError("this model has no Hugging Face names: export them as nnx", parameter="naming")
    tensors: dict[str, Any] = {}
    for parameter, array in zip(layout.parameters, arrays, strict=True):
        rule = layout.rules[parameter.path]
        if rule.tensor_dtype is not None:
            raise WeightUpdateError(
                f"{parameter.name} stands in checkpoints as {rule.tensor_dtype}, into which it cannot be turned back: "
                "export the weights as nnx",
                parameter="naming",
            )
        for name, tensor in zip(rule.tensors, _taken_apart(rule, array), strict=True):
            # Two parameters may be cut from one tensor: each gives its part of it, and zeros elsewhere.
            tensors[name] = tensors[name] + tensor if name in tensors else tensor
    return tensors


def _taken_apart(rule: WeightRule, array: Array) -> Sequence[Array]:
    shapes = rule.shapes(tuple(array.shape))
    if rule.join is None:
        if len(shapes) == 1:
            return [array]
        ends = [sum(shape[0] for shape in shapes[: index + 1]) for index in range(len(shapes))]
        return [array[end - shape[0] : end] for end, shape in zip(ends, shapes, strict=True)]
    # Joins only put elements elsewhere, so that their transpose puts them back.
    structs = [jax.ShapeDtypeStruct(shape, array.dtype) for shape in shapes]
    (tensors,) = jax.linear_transpose(lambda parts: jnp.asarray(rule.value(parts)), structs)(array)
    return tensors
