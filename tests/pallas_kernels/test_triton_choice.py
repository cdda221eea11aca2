"""When Triton kernels run and why not; what they compute is checked on a GPU (tests/gpu/test_triton_kernels.py)."""

import importlib.util
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels import decode_attention as decode_op
from tokenspeed_jax.pallas_kernels import gated_delta_rule as delta_op
from tokenspeed_jax.pallas_kernels import linear_attention as linear_op
from tokenspeed_jax.pallas_kernels import triton_calls
from tokenspeed_jax.pallas_kernels.implementations import choose_implementation
from tokenspeed_jax.pallas_kernels.problems import PagedProblem
from tokenspeed_jax.pallas_kernels.recurrent_problems import ragged_rows, random_delta_rule, random_linear_attention

MODELS = {"key_dim": 128, "value_dim": 128, "dtype": "bfloat16"}


@pytest.fixture
def on_hopper(monkeypatch):
    """A Hopper GPU, as far as refusals know, and jax-triton beside it."""
    for op in (decode_op, delta_op, linear_op):
        monkeypatch.setattr(op, "hopper_refusal", lambda: None)
    for op in (decode_op, delta_op):
        monkeypatch.setattr(op, "triton_missing", lambda: None)


@pytest.fixture
def ran(monkeypatch):
    """Names of the implementations that ran; in place of kernels, their references."""
    names = []

    def standing_in(name, function):
        def run(*arguments):
            names.append(name)
            return function(*arguments)

        return run

    for op, mosaic, reference in (
        (decode_op, "decode_attention_mosaic", decode_op.decode_attention_reference),
        (delta_op, "gated_delta_rule_mosaic", delta_op.gated_delta_rule_reference),
    ):
        monkeypatch.setattr(op, "_in_triton", standing_in("triton", reference))
        monkeypatch.setattr(op, mosaic, standing_in("mosaic", reference))
    return names


def decode(**options):
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=[1], kv_lens=[5], num_heads=1, num_kv_heads=1, head_dim=64,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    return decode_op.decode_attention(*problem.decode_arguments(), scale=1.0, **options)


def delta_rule(implementation=None, *, key_dim=128, value_dim=64, dtype=jnp.bfloat16, channel_gates=True):
    inputs = random_delta_rule(
        np.random.default_rng(1), 2, key_heads=1, heads=1, key_dim=key_dim, value_dim=value_dim,
        decay_per_channel=channel_gates, dtype=dtype,
    )  # fmt: skip
    initial = jnp.zeros((1, 1, value_dim, key_dim))
    return delta_op.gated_delta_rule(inputs, initial, ragged_rows([2]), implementation=implementation)


@pytest.mark.usefixtures("on_hopper")
def test_the_delta_rule_with_channel_gates_takes_triton_where_it_serves_and_then_mosaic(ran, monkeypatch):
    delta_rule()
    delta_rule("mosaic")
    delta_rule(key_dim=64)  # Mosaic serves it
    delta_rule(channel_gates=False)  # Mosaic is the faster
    monkeypatch.setattr(delta_op, "triton_missing", lambda: "the package jax-triton is not installed")
    delta_rule()
    assert ran == ["triton", "mosaic", "mosaic", "mosaic", "mosaic"]
    delta_rule(dtype=jnp.float32)
    assert len(ran) == 5
    with pytest.raises(ValueError, match="'triton' cannot serve this call: the package jax-triton is not installed"):
        delta_rule("triton")


@pytest.mark.usefixtures("on_hopper")
def test_decode_runs_in_triton_where_it_is_named_only(ran, monkeypatch):
    decode()
    decode(implementation="triton")
    assert ran == ["mosaic", "triton"]
    monkeypatch.setattr(decode_op, "triton_missing", lambda: "the package jax-triton is not installed")
    with pytest.raises(ValueError, match="'triton' cannot serve this call: the package jax-triton is not installed"):
        decode(implementation="triton")


@pytest.mark.usefixtures("on_hopper")
def test_the_delta_rule_in_triton_refuses_what_was_not_seen_right():
    assert delta_op.triton_refusal(**MODELS) is None
    for change, word in (
        ({"dtype": "float16"}, "values of float16"),
        ({"key_dim": 64}, "key dim 64 is not 128"),
        ({"value_dim": 96}, "value dim 96 is no multiple of 64"),
    ):
        assert word in delta_op.triton_refusal(**{**MODELS, **change})


def test_on_another_device_the_reason_is_the_device():
    for call in (lambda: decode(implementation="triton"), lambda: delta_rule("triton")):
        with pytest.raises(ValueError, match="'triton' cannot serve this call: the default device is a cpu"):
            call()


@pytest.mark.usefixtures("on_hopper")
def test_an_operation_without_a_triton_kernel_says_so():
    inputs = random_linear_attention(
        np.random.default_rng(2), 1, key_heads=1, heads=1, key_dim=128, value_dim=64, dtype=jnp.bfloat16
    )
    with pytest.raises(ValueError, match="'triton' cannot serve this call: there is no Triton kernel"):
        linear_op.linear_attention(inputs, jnp.zeros((1, 1, 64, 128)), ragged_rows([1]), implementation="triton")
    assert choose_implementation(None, None) == "mosaic"
    assert choose_implementation(None, "no") == "xla"
    assert choose_implementation(None, "no", triton_refusal=None) == "xla"
    assert choose_implementation(None, "no", triton_refusal="no", order=("triton", "mosaic", "xla")) == "xla"


def test_a_missing_package_and_an_unsuitable_version_are_the_reason(monkeypatch):
    missing = triton_calls.triton_missing.__wrapped__
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else name)
    assert missing() == "the package jax-triton is not installed (extra `triton`)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(triton_calls.importlib.metadata, "version", lambda name: "3.9.0")
    assert missing() == "Triton 3.9.0 is not from 3.6 on and before 3.9"
    for version, served in (("3.5.1", False), ("3.6.0", True), ("3.8.0+git12ab", True), ("3.10.0", False)):
        assert (triton_calls.version_refusal(version) is None) == served


def test_no_import_of_the_package_imports_triton(tmp_path):
    for name in triton_calls.MODULES:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('was imported')\n")
    modules = ("engine", "pallas_kernels.recurrences", "pallas_kernels.decode_attention", "attention.kernel_choice")
    imports = "; ".join(f"import tokenspeed_jax.{name}" for name in modules)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {imports}"
    subprocess.run([sys.executable, "-c", script], check=True)
