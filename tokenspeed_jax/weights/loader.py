"""Filling a model with a checkpoint's tensors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tqdm import tqdm

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.models.hf_config import UnsupportedConfig
from tokenspeed_jax.models.registry import ModelConfig, ModelFamily, resolve_model
from tokenspeed_jax.models.weight_map import WeightRule
from tokenspeed_jax.weights.checkpoint import Checkpoint, CheckpointConfig
from tokenspeed_jax.weights.tensor_source import TensorSource

_LISTED = 10
HEAD = "lm_head.weight"


def model_of(checkpoint: CheckpointConfig) -> tuple[ModelFamily, ModelConfig]:
    """The architecture and configuration of a checkpoint.

    Raises:
        CheckpointError: an architecture or a field that is not supported; the message names it.
    """
    try:
        return resolve_model(checkpoint.hf_config)
    except UnsupportedConfig as error:
        raise CheckpointError(f"{checkpoint.name}: {error}") from error


def load_model(checkpoint: Checkpoint, *, dtype: DTypeLike, progress: bool = True) -> Any:
    """Builds the checkpoint's model on the default device, in `dtype` (some parameters are float32 always).

    Tensors go to the device one after another, in the dtype they are stored in, and are cast and joined there: the
    host never holds a second copy, and the device never more than one parameter beside the model.

    Args:
        progress: show a progress bar.

    Returns:
        An `nnx.Module` that is a `CausalLM`.

    Raises:
        CheckpointError: an unsupported model, or tensors that are missing, unknown or of the wrong shape.
    """
    family, config = model_of(checkpoint)
    abstract = nnx.eval_shape(lambda: family.build(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    variables = dict(nnx.to_flat_state(state))
    rules = family.weight_map(config)
    _check_rules(rules, variables)
    ignored = (*family.ignored_tensors(config), *((HEAD,) if config.tie_word_embeddings else ()))
    _check_tensors(checkpoint, rules, variables, ignored)
    total = sum(math.prod(v.shape) * jnp.dtype(v.dtype).itemsize for v in variables.values())
    filled = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
        for rule in rules:
            variable = variables[rule.parameter]
            value = _parameter(checkpoint.tensors, rule, variable.dtype)
            filled.append((rule.parameter, variable.replace(value)))
            bar.update(value.nbytes)
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _parameter(tensors: TensorSource, rule: WeightRule, dtype: jnp.dtype) -> jax.Array:
    def part(name: str) -> jax.Array:
        # On a CPU device the array would otherwise be a view of the mapped file, which may change or go away.
        stored = jax.device_put(tensors.read(name), may_alias=False)
        return stored.astype(dtype) if rule.tensor_dtype is None else stored

    value = rule.value([part(name) for name in rule.tensors]).astype(dtype)
    return value.block_until_ready()  # so that the parts are free before the next ones come


def _check_rules(rules: Sequence[WeightRule], variables: Mapping[Any, Any]) -> None:
    """Every parameter has exactly one rule; anything else is a mistake in the model's file."""
    named = [rule.parameter for rule in rules]
    if len(set(named)) != len(named) or set(named) != set(variables):
        raise AssertionError(f"weight map and parameters differ: {set(named) ^ set(variables)}")


def _check_tensors(
    checkpoint: Checkpoint, rules: Sequence[WeightRule], variables: Mapping[Any, Any], ignored: tuple[str, ...]
) -> None:
    """Compares what the checkpoint has with what the model needs; raises once, naming all that differ.

    Args:
        ignored: beginnings of names that may be there without being needed: a copy of a tied head, or what a family
            leaves out.
    """
    tensors = checkpoint.tensors
    present = set(tensors.names())
    needed = {
        name: shape
        for rule in rules
        for name, shape in zip(rule.tensors, rule.shapes(tuple(variables[rule.parameter].shape)), strict=True)
    }
    packed = {name: rule.tensor_dtype for rule in rules for name in rule.tensors if rule.tensor_dtype is not None}
    missing = [name for name in needed if name not in present]
    extra = sorted(name for name in present - needed.keys() if not is_ignorable(name, ignored))
    misshapen = [
        f"{name} {tuple(tensors.shape(name))} where {shape} is expected"
        for name, shape in needed.items()
        if name in present and tuple(tensors.shape(name)) != shape
    ]
    inexact = [
        f"{name} ({tensors.dtype(name)})"
        for name in needed
        if name in present and name not in packed and not jnp.issubdtype(tensors.dtype(name), np.floating)
    ]
    mistyped = [
        f"{name} {tensors.dtype(name)} where {dtype} is expected"
        for name, dtype in packed.items()
        if name in present and tensors.dtype(name) != dtype
    ]
    problems = [
        f"{len(found)} {what}: {', '.join(found[:_LISTED])}{', ...' if len(found) > _LISTED else ''}"
        for what, found in (
            ("missing", missing),
            ("unknown", extra),
            ("of the wrong shape", misshapen),
            ("not floating-point", inexact),
            ("of the wrong dtype", mistyped),
        )
        if found
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.name}: tensors do not fit the configuration: {'; '.join(problems)}")


def is_ignorable(name: str, ignored: tuple[str, ...]) -> bool:
    """Tensors that need no home: those, and rotary frequencies, which some exporters add and are computed here."""
    return name.endswith("rotary_emb.inv_freq") or name.startswith(ignored)
