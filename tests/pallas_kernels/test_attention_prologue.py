"""Norm, rotation and cache write in one: the kernel does what the plain form does, and writes live slots alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels.attention_prologue import AttentionPrologue, attention_prologue
from tokenspeed_jax.pallas_kernels.attention_prologue.mosaic import attention_prologue_mosaic
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.rotation import Rotation

PAGE = 8
LLAMA, OLMO, GEMMA = NormRule(1e-6), NormRule(1e-5, rounds_first=False), NormRule(1e-6, False, gain_offset=1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """Heads of one layer, and what is done to them."""

    heads: int
    kv_heads: int
    dim: int
    rotary: int | None
    rule: NormRule | None
    behind: int = 0  # columns behind the values
    tokens: int = 3


CASES = {
    "qwen3": Case(16, 8, 128, 128, LLAMA),
    "llama": Case(9, 3, 64, 64, None),
    "olmo": Case(4, 4, 64, 64, OLMO),
    "gemma": Case(8, 4, 256, 256, GEMMA),
    "one_kv_head": Case(4, 1, 256, 256, GEMMA),
    "partial_and_gated": Case(16, 2, 256, 64, GEMMA, behind=512),
    "unrotated": Case(6, 2, 128, None, LLAMA),
    "nothing": Case(12, 4, 64, None, None),
    "many_tokens": Case(4, 2, 128, 128, LLAMA, tokens=7),
}


def problem(case, seed=0, dtype=jnp.bfloat16, shared=False):
    """Arguments of `attention_prologue`: random pages, of which k's and v's ids 0 lie at different rows."""
    rng = np.random.default_rng(seed)

    def normal(*shape, to=dtype):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32), to)

    pages = normal(9, PAGE, case.kv_heads, case.dim)
    k = dataclasses.replace(PageView.from_array(pages), first_row=1)
    v = dataclasses.replace(k, first_row=3) if shared else dataclasses.replace(PageView.from_array(2 * pages))
    angles = normal(case.tokens, (case.rotary or 0) // 2, to=jnp.float32)
    norms = [None if case.rule is None else Norm(1 + 0.1 * normal(case.dim), case.rule) for _ in range(2)]
    rotation = None if case.rotary is None else Rotation(jnp.cos(angles), jnp.sin(angles))
    # Half of the tokens in pages of their own, one in the null page, one nowhere.
    slots = rng.permutation(np.arange(1, 4) * PAGE)[np.arange(case.tokens) % 3] + np.arange(case.tokens)
    slots[1], slots[2] = rng.integers(0, PAGE), -1
    columns = (case.heads + 2 * case.kv_heads) * case.dim + case.behind
    return (normal(case.tokens, columns), k, v, jnp.asarray(slots, jnp.int32), AttentionPrologue(rotation, *norms))


def run_kernel(case, arguments, interpret, **tiling):
    projected, k, v, slots, prologue = arguments
    norms = (prologue.q_norm, prologue.k_norm)
    return attention_prologue_mosaic(
        projected,
        k,
        v,
        slots,
        tuple(None if norm is None else norm.weight for norm in norms),
        prologue.rotation,
        num_heads=case.heads,
        rules=tuple(None if norm is None else norm.rule for norm in norms),
        shared_plane=v.plane is k.plane,
        interpret=interpret,
        **tiling,
    )


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        a, b = (x.typed() if isinstance(x, PageView) else x for x in (one, other))
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        # One rounding to bfloat16 may fall the other way.
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-6)
        assert (a != b).mean() < 0.01


@pytest.mark.parametrize("shared", [False, True], ids=["two_planes", "one_plane"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_the_plain_form(interpret, case, shared):
    arguments = problem(case, shared=shared)
    expected = attention_prologue(*arguments, num_heads=case.heads, implementation="reference")
    assert_same(run_kernel(case, arguments, interpret), expected)
