"""Which kernels serve which layers, and the reasons why the fastest do not."""

import pytest

from tokenspeed_jax.attention.kernel_choice import kernel_families, mosaic_refusals, triton_refusal
from tokenspeed_jax.attention.kernel_page_sizes import kernel_page_size
from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import AttentionSpec, LatentAttentionSpec, RecurrentSpec
from tokenspeed_jax.pallas_kernels import (
    decode_attention,
    gated_delta_rule,
    latent_attention,
    prefill_attention,
    recurrences,
)

HEADS = AttentionSpec(0, num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0)
LATENT = LatentAttentionSpec(1, num_heads=128, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, scale=1.0)
STATE = RecurrentSpec(2, (64, 4), (4, 128, 128))
BINDINGS = tuple(LayerBinding(i, group, (), -1) for i, group in enumerate(("heads", "latents", "states")))
PAGES = {"heads": 64, "latents": 64}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode_attention, prefill_attention, latent_attention, recurrences):
        monkeypatch.setattr(module, "hopper_refusal", lambda: None)


def test_each_group_is_read_by_the_kernels_of_its_layers() -> None:
    assert kernel_families((HEADS, LATENT, STATE), BINDINGS) == {"heads": "mha", "latents": "mla"}
    with pytest.raises(ValueError, match="'heads' is read by kernels of two families"):
        kernel_families((HEADS, LATENT), (BINDINGS[0], BINDINGS[0]))


@pytest.mark.usefixtures("on_hopper")
def test_on_a_hopper_gpu_the_kernels_serve_every_kind_of_layer() -> None:
    assert mosaic_refusals((HEADS, LATENT, STATE), BINDINGS, PAGES, "bfloat16") == {}


@pytest.mark.usefixtures("on_hopper")
def test_a_latent_layer_that_a_kernel_cannot_serve_says_why() -> None:
    refusals = mosaic_refusals((LATENT,), BINDINGS[1:2], {"latents": 32}, "bfloat16")
    assert refusals["latent decode"] == "layer 1: pages hold 32 tokens, the kernel takes 64"
    assert list(refusals) == ["latent decode"]
    refusals = mosaic_refusals((LATENT,), BINDINGS[1:2], PAGES, "float32")
    assert all("float32" in refusals[f"latent {operation}"] for operation in ("decode", "prefill"))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("state_shape", "dtype", "reason"),
    [
        ((4, 128, 16), "bfloat16", "key dim 16 is none of"),
        ((4, 96, 128), "bfloat16", "value dim 96 is no multiple of 64"),
        ((4, 128, 128), "float32", "values of float32"),
        ((1024, 16), "bfloat16", "selective scan: there is no kernel"),
    ],
)
def test_a_recurrence_that_the_kernels_cannot_serve_says_why(
    state_shape: tuple[int, ...], dtype: str, reason: str
) -> None:
    layers = (RecurrentSpec(0, (64, 4), None), RecurrentSpec(1, None, state_shape))
    refusals = mosaic_refusals(layers, (BINDINGS[2],) * 2, {}, dtype)
    assert list(refusals) == ["recurrence"]
    assert refusals["recurrence"].startswith("layer 1: ")
    assert reason in refusals["recurrence"]


@pytest.mark.usefixtures("on_hopper")
def test_only_a_delta_rule_that_triton_does_not_serve_has_a_reason_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    delta = RecurrentSpec(3, (64, 4), (4, 128, 128), channel_gates=True)
    others = (HEADS, LATENT, STATE, RecurrentSpec(4, (64, 4), None))
    monkeypatch.setattr(gated_delta_rule, "hopper_refusal", lambda: None)
    monkeypatch.setattr(gated_delta_rule, "triton_missing", lambda: "the package jax-triton is not installed")
    assert triton_refusal(others, "bfloat16") is None
    assert triton_refusal((*others, delta), "bfloat16") == "layer 3: the package jax-triton is not installed"
    monkeypatch.setattr(gated_delta_rule, "triton_missing", lambda: None)
    assert triton_refusal((*others, delta), "bfloat16") is None
    assert "float32" in str(triton_refusal((delta,), "float32"))


def test_elsewhere_every_reason_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode_attention, prefill_attention, latent_attention, recurrences):
        monkeypatch.setattr(module, "hopper_refusal", lambda: "the default device is a toaster")
    refusals = mosaic_refusals((HEADS, LATENT, STATE), BINDINGS, PAGES, "bfloat16")
    assert set(refusals) == {"decode", "prefill", "latent decode", "latent prefill", "recurrence"}
    assert all("the default device is a toaster" in reason for reason in refusals.values())


def test_latents_have_pages_of_64_tokens_or_less() -> None:
    assert [kernel_page_size("mla", 128, size) for size in (None, 16, 32, 64)] == [64, 16, 32, 64]
    with pytest.raises(ConfigError, match="one of 16, 32, 64 for the mla kernels, got 128"):
        kernel_page_size("mla", 128, 128)
