"""Which tensors of a Hugging Face checkpoint make up each parameter of a model."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """One parameter and the checkpoint tensors it is made of.

    Unless `join` says otherwise, several tensors are stacked along their first axis, in order.

    Attributes:
        parameter: path in the model's nnx state, such as ("layers", 0, "mlp", "down", "weight").
        tensors: names in the checkpoint.
        rows: length of each tensor's first axis; with one tensor it is the parameter's own and stays None.
        join: makes the parameter of the tensors, on the device; None concatenates.
        tensor_shapes: the tensors' shapes, with `join`.
        tensor_dtype: of tensors that are no numbers until `join` has made them so, such as packed bytes; they reach it
            as they are stored. None for floating-point tensors, which are cast to the parameter's dtype first.
    """

    parameter: tuple[str | int, ...]
    tensors: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    join: Callable[[Sequence[Array]], Array] | None = None
    tensor_shapes: tuple[tuple[int, ...], ...] | None = None
    tensor_dtype: str | None = None

    def __post_init__(self) -> None:
        if (self.join is None) != (self.tensor_shapes is None):
            raise ValueError(f"{self.parameter}: join and tensor_shapes go together")
        if self.tensor_dtype is not None and self.join is None:
            raise ValueError(f"{self.parameter}: tensors of {self.tensor_dtype} need a join")
        given = self.tensor_shapes if self.rows is None else self.rows
        if len(self.tensors) != (1 if given is None else len(given)):
            raise ValueError(f"{self.parameter}: {len(self.tensors)} tensors but rows or shapes {given}")

    def shapes(self, parameter_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shape that each tensor must have for a parameter of `parameter_shape`."""
        if self.tensor_shapes is not None:
            return self.tensor_shapes
        if self.rows is None:
            return (parameter_shape,)
        return tuple((rows, *parameter_shape[1:]) for rows in self.rows)

    def value(self, parts: Sequence[Array]) -> Array:
        """The parameter, of its tensors."""
        if self.join is not None:
            return self.join(parts)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def same(parameter: tuple[str | int, ...], tensor: str) -> WeightRule:
    """A parameter that is one tensor as it stands."""
    return WeightRule(parameter, (tensor,))


def reshaped(
    parameter: tuple[str | int, ...], tensor: str, tensor_shape: tuple[int, ...], shape: tuple[int, ...]
) -> WeightRule:
    """A parameter that is one tensor with other axes, such as a convolution's without the axis of 1."""
    return WeightRule(parameter, (tensor,), join=lambda parts: parts[0].reshape(shape), tensor_shapes=(tensor_shape,))


def reordered(
    parameter: tuple[str | int, ...],
    tensors: tuple[str, ...],
    rows: tuple[int, ...],
    order: np.ndarray,
    columns: tuple[int, ...],
) -> WeightRule:
    """A parameter whose row i is row order[i] of several tensors stacked, each of `columns` behind its rows."""
    if sorted(order) != list(range(sum(rows))):
        raise ValueError(f"{parameter}: order must name each of {sum(rows)} rows once")
    shapes = tuple((count, *columns) for count in rows)
    return WeightRule(
        parameter, tensors, join=lambda parts: jnp.concatenate(parts, axis=0)[order], tensor_shapes=shapes
    )


def stacked(
    parameter: tuple[str | int, ...], tensors: Sequence[tuple[str, ...]], shapes: Sequence[tuple[int, ...]]
) -> WeightRule:
    """A parameter with one entry per expert on its first axis.

    Args:
        tensors: the names of each expert; an expert's tensors are stacked by rows.
        shapes: of one expert's tensors.
    """
    each = len(shapes)

    def join(parts: Sequence[Array]) -> Array:
        return jnp.stack([jnp.concatenate(parts[i : i + each], axis=0) for i in range(0, len(parts), each)])

    names = tuple(name for expert in tensors for name in expert)
    return WeightRule(parameter, names, join=join, tensor_shapes=tuple(shapes) * len(tensors))


def linear_rules(parameter: tuple[str | int, ...], tensor: str, *, bias: bool) -> Iterator[WeightRule]:
    """`weight`, and `bias` where there is one, of one projection."""
    for leaf in ("weight", "bias") if bias else ("weight",):
        yield same((*parameter, leaf), f"{tensor}.{leaf}")


def fused_rules(
    parameter: tuple[str | int, ...], tensors: tuple[str, ...], rows: tuple[int, ...], *, bias: bool = False
) -> Iterator[WeightRule]:
    """`weight`, and `bias` where there is one, of several projections fused by rows."""
    for leaf in ("weight", "bias") if bias else ("weight",):
        yield WeightRule((*parameter, leaf), tuple(f"{tensor}.{leaf}" for tensor in tensors), rows)


def gated_mlp_rules(parameter: tuple[str | int, ...], tensor: str, intermediate_size: int) -> Iterator[WeightRule]:
    """The rules of a `GatedMLP` without biases."""
    gate_up = (f"{tensor}.gate_proj", f"{tensor}.up_proj")
    yield from fused_rules((*parameter, "gate_up"), gate_up, (intermediate_size,) * 2)
    yield from linear_rules((*parameter, "down"), f"{tensor}.down_proj", bias=False)


def vocabulary_rules(config: Any) -> Iterator[WeightRule]:
    """What stands around the layers of a `CausalDecoder`: embedding, final norm and, unless it is tied, the head."""
    yield same(("embed", "weight"), "model.embed_tokens.weight")
    yield same(("norm", "weight"), "model.norm.weight")
    if not config.tie_word_embeddings:
        yield same(("head", "weight"), "lm_head.weight")


def decoder_rules(
    config: Any, norms: dict[str, str], mlp_rules: Callable[[int], Iterable[WeightRule]] | None = None
) -> tuple[WeightRule, ...]:
    """The names shared by Llama and its descendants.

    Args:
        config: a `DecoderConfig`.
        norms: parameter path within a layer (dotted) -> tensor name within that layer, for the layer's norms.
        mlp_rules: those of a layer's feed-forward block, by layer id; None where every layer has the dense `mlp`.
    """
    rules = list(vocabulary_rules(config))
    for spec in config.attention_layers():
        here, there = ("layers", spec.layer_id), f"model.layers.{spec.layer_id}"
        q = spec.num_heads * spec.head_dim
        kv = spec.num_kv_heads * spec.head_dim
        qkv = tuple(f"{there}.self_attn.{x}_proj" for x in "qkv")
        rules += fused_rules((*here, "attention", "qkv", "proj"), qkv, (q, kv, kv), bias=config.attention_bias)
        rules += linear_rules((*here, "attention", "out"), f"{there}.self_attn.o_proj", bias=config.attention_bias)
        if mlp_rules is None:
            rules += gated_mlp_rules((*here, "mlp"), f"{there}.mlp", config.intermediate_size)
        else:
            rules += mlp_rules(spec.layer_id)
        rules += [same((*here, *path.split("."), "weight"), f"{there}.{name}.weight") for path, name in norms.items()]
    return tuple(rules)
