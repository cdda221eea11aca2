"""A decoder layer after its attention in one launch, on a Hopper GPU, against the definition at models' shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.decoder_tail import decoder_tail, mosaic_refusal
from tokenspeed_jax.pallas_kernels.implementations import hopper_refusal
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule

# Hidden, heads x dim, inner: Qwen3-8B, Qwen3-4B, Llama 3.2 1B; the second leaves blocks without a tile of some product.
SHAPES = [(4096, 4096, 12288), (2560, 4096, 9728), (2048, 2048, 8192)]


@pytest.fixture(autouse=True)
def _hopper():
    refusal = hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def problem(tokens, hidden, mixed, inner):
    keys = iter(jax.random.split(jax.random.key(tokens), 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    return (
        (normal(tokens, hidden), normal(tokens, mixed), normal(hidden, mixed) / mixed**0.5),
        normal(hidden),
        (normal(2 * inner, hidden) / hidden**0.5, normal(hidden, inner) / inner**0.5),
    )


def run(implementation, first, gain, last):
    out, update = decoder_tail(
        *first, Norm(gain, NormRule(1e-6)), *last, activation="silu", implementation=implementation
    )
    return out if update is None else out + update


@pytest.mark.parametrize("tokens", [1, 7, 16, 64])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_the_kernel_equals_the_definition_and_repeats_its_bits(sizes, tokens):
    arguments = problem(tokens, *sizes)
    fused = jax.jit(functools.partial(run, "mosaic"))
    out = np.asarray(fused(*arguments), np.float32)
    wanted = np.asarray(jax.jit(functools.partial(run, "reference"))(*arguments), np.float32)
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - wanted) <= 6e-3 * np.linalg.norm(wanted)
    for _ in range(20):  # a block that reads what another has not written yet would move bits
        np.testing.assert_array_equal(np.asarray(fused(*arguments), np.float32), out)


def test_a_row_has_the_same_bits_beside_other_rows():
    first, gain, last = problem(16, *SHAPES[2])
    fused = jax.jit(functools.partial(run, "mosaic"))
    together = np.asarray(fused(first, gain, last), np.float32)
    alone = fused((first[0][5:6], first[1][5:6], first[2]), gain, last)
    np.testing.assert_array_equal(np.asarray(alone, np.float32)[0], together[5])


def test_it_is_the_default_for_few_tokens_of_bfloat16():
    (x, mixed, out_weight), gain, (_, down) = problem(8, *SHAPES[2])
    norm = Norm(gain, NormRule(1e-6))
    assert mosaic_refusal(x, mixed, out_weight, norm, down) is None
    assert "float32" in (mosaic_refusal(x.astype(jnp.float32), mixed, out_weight, norm, down) or "")
