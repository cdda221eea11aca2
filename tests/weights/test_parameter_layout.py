"""A trainer's parameters find their places under every naming, and come back under a checkpoint's names."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze, meta
from flax.linen import Partitioned

from tokenspeed_jax.errors import WeightUpdateError
from tokenspeed_jax.weights import load_model, open_checkpoint
from tokenspeed_jax.weights.checkpoint_export import checkpoint_tensors
from tokenspeed_jax.weights.parameter_layout import ParameterLayout
from tokenspeed_jax.weights.weight_conversion import WeightConversions

TINY = Path(__file__).parents[1] / "golden" / "tiny"


@functools.cache
def loaded(family: str) -> Any:
    return load_model(open_checkpoint(str(TINY / family)), dtype=jnp.float32, progress=False)


@pytest.fixture(scope="module")
def layout() -> ParameterLayout:
    return ParameterLayout.of(loaded("llama"))


def renamed(tree: Any, rename: Any) -> Any:
    return {rename(key): renamed(value, rename) for key, value in tree.items()} if isinstance(tree, dict) else tree


def linen_form(tree: dict[Any, Any]) -> dict[str, Any]:
    """Lists as linen flattens them, and values in boxes."""
    tree = {str(key): value for key, value in tree.items()}
    layers = tree.pop("layers")
    tree |= {f"layers_{index}": layer for index, layer in layers.items()}
    return {"params": jax.tree.map(lambda x: Partitioned(x, names=(None,) * x.ndim), tree)}


FORMS: dict[str, Any] = {
    "module": lambda model: model,
    "state": nnx.state,
    "pure dict": lambda model: nnx.to_pure_dict(nnx.state(model)),
    "numbers as text": lambda model: renamed(nnx.to_pure_dict(nnx.state(model)), str),
    "collection": lambda model: {"params": nnx.to_pure_dict(nnx.state(model))},
    "linen": lambda model: linen_form(nnx.to_pure_dict(nnx.state(model))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_tree_is_the_same_arrays(layout: ParameterLayout, form: str) -> None:
    model = loaded("llama")
    assigned = layout.assign(FORMS[form](model))
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(assignment.parts[0] is leaf for assignment, leaf in zip(assigned, leaves, strict=True))


def test_the_order_is_that_of_the_leaves_also_behind_the_tenth_layer() -> None:
    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.items = nnx.List([nnx.Param(jnp.full(2, float(index))) for index in range(12)])

    model = Stack()
    layout = ParameterLayout.of(model)
    assigned = layout.assign(nnx.state(model))
    for parameter, assignment, leaf in zip(layout.parameters, assigned, jax.tree.leaves(nnx.state(model)), strict=True):
        assert assignment.parts[0] is leaf
        assert parameter.name == f"items.{int(leaf[0])}"
    with pytest.raises(WeightUpdateError, match="no Hugging Face names"):
        layout.assign({"items.0": jnp.ones(2)})
    with pytest.raises(WeightUpdateError, match="no Hugging Face names"):
        checkpoint_tensors(layout, jax.tree.leaves(nnx.state(model)))


def test_all_that_is_wrong_is_named_at_once(layout: ParameterLayout) -> None:
    params = nnx.to_pure_dict(nnx.state(loaded("llama")))
    params = jax.tree.map(lambda x: x, params)
    del params["norm"]
    params["layers"][0]["mlp"]["down"]["weight"] = jnp.ones((3, 4))
    params["extra"] = {"bias": jnp.ones(1)}
    with pytest.raises(WeightUpdateError) as error:
        layout.assign(params)
    for part in (
        "1 unknown: extra.bias",
        "1 missing: norm.weight",
        "layers.0.mlp.down.weight (3, 4) where (64, 128) is expected",
    ):
        assert part in str(error.value)


def tensors_of(family: str) -> dict[str, np.ndarray]:
    source = open_checkpoint(str(TINY / family)).tensors
    return {name: np.asarray(source.read(name), np.float32) for name in source.names()}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next", "kimi_linear", "gemma3"])
def test_names_of_a_checkpoint_lead_there_and_back(family: str) -> None:
    """Fused, stacked, reordered, cut and reshaped parameters; a tied head."""
    model, tensors = loaded(family), tensors_of(family)
    layout, leaves = ParameterLayout.of(model), jax.tree.leaves(nnx.state(model))
    exported = checkpoint_tensors(layout, leaves)
    needed = {name for rule in layout.rules.values() for name in rule.tensors}
    assert set(exported) == needed <= set(tensors)
    for name, tensor in exported.items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)
    # What a checkpoint has beside what is needed may be given too.
    assigned = layout.assign(tensors)
    for assignment, leaf in zip(assigned, leaves, strict=True):
        made = assignment.rule.value([jnp.asarray(part) for part in assignment.parts])
        np.testing.assert_array_equal(made.astype(leaf.dtype), leaf, err_msg=assignment.parameter.name)


def test_quantised_tensors_are_not_given_back(layout: ParameterLayout) -> None:
    path, rule = next(iter(layout.rules.items()))
    packed = dataclasses.replace(rule, join=lambda parts: parts[0], tensor_shapes=((2,),), tensor_dtype="uint8")
    quantised = dataclasses.replace(layout, rules={**layout.rules, path: packed})
    with pytest.raises(WeightUpdateError, match=r"embed.weight stands in checkpoints as uint8"):
        checkpoint_tensors(quantised, jax.tree.leaves(nnx.state(loaded("llama"))))
    with pytest.raises(WeightUpdateError, match=r"of the wrong dtype: model.embed_tokens.weight int8 where uint8"):
        quantised.assign({**tensors_of("llama"), rule.tensors[0]: np.zeros(2, np.int8)})


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from tokenspeed_jax.weights.parameter_layout import ParameterLayout
from tokenspeed_jax.weights.weight_conversion import WeightConversions

class Pair(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.zeros((16, 8), jnp.float32))
        self.b = nnx.Param(jnp.zeros((16, 8), jnp.bfloat16))
        self.c = nnx.Param(jnp.zeros(8, jnp.float32))

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
place = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
a, c = np.arange(128, dtype=np.float32).reshape(16, 8), np.arange(8, dtype=np.float32)
given = {"a": place(a, "fsdp", "tensor"), "b": place(a, "fsdp", None), "c": place(c)}
layout = ParameterLayout.of(Pair())
with jax.transfer_guard_device_to_host("disallow"):
    ready = WeightConversions().prepare(layout.assign({"params": given}), check_finite=False)
    (b,) = ready.program((jnp.zeros((16, 8), jnp.bfloat16),), ready.parts)
assert set(ready.moved) == {0} and set(ready.kept) == {2} and ready.converted == (1,), ready
own = jax.sharding.SingleDeviceSharding(jax.devices()[0])
for got, expected in ((ready.moved[0], a), (b, a.astype(jnp.bfloat16)), (ready.kept[2], c)):
    assert got.sharding.is_equivalent_to(own, got.ndim), got.sharding
    np.testing.assert_array_equal(got, expected)
first = next(s.data for s in given["c"].addressable_shards if s.device == jax.devices()[0])
assert ready.kept[2].unsafe_buffer_pointer() == first.unsafe_buffer_pointer()
"""


def test_arrays_of_a_mesh_are_gathered_without_the_host() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    paths = ":".join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-c", SHARDED], check=True, timeout=300, env=environment | {"PYTHONPATH": paths, "PATH": ""}
    )


def test_a_kind_of_update_compiles_once(layout: ParameterLayout) -> None:
    conversions = WeightConversions()
    tensors = {name: jnp.asarray(tensor) for name, tensor in tensors_of("llama").items()}
    for _ in range(2):
        ready = conversions.prepare(layout.assign(tensors), check_finite=False)
        assert conversions.compilations == 1
    assert len(ready.converted) == 8
    assert ready.moved == {}


def test_linens_boxes_and_frozen_dicts_are_opened(layout: ParameterLayout) -> None:
    tree = linen_form(nnx.to_pure_dict(nnx.state(loaded("llama"))))
    assert isinstance(tree["params"]["norm"]["weight"], meta.AxisMetadata)
    assert len(layout.assign(freeze(tree))) == len(layout.parameters)
