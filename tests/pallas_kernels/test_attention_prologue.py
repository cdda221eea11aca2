"""Norm, rotation and cache write in one: the kernel does what the plain form does, and writes live slots alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels.attention_prologue import (
    AttentionPrologue,
    attention_prologue,
    mosaic,
    mosaic_refusal,
)
from tokenspeed_jax.pallas_kernels.attention_prologue.mosaic import attention_prologue_mosaic, parts_of, tiles_of
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.rotation import Rotation

from .one_program import one_program

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
    angles = rng.standard_normal((case.tokens, (case.rotary or 0) // 2), dtype=np.float32)
    gains = [jnp.asarray(1 + 0.1 * rng.standard_normal(case.dim, dtype=np.float32), dtype) for _ in range(2)]
    norms = [None if case.rule is None else Norm(gain, case.rule) for gain in gains]
    rotation = None if case.rotary is None else Rotation(jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)))
    # Half of the tokens in pages of their own, one in the null page, one nowhere.
    slots = rng.permutation(np.arange(1, 4) * PAGE)[np.arange(case.tokens) % 3] + np.arange(case.tokens)
    slots[1], slots[2] = rng.integers(0, PAGE), -1
    columns = (case.heads + 2 * case.kv_heads) * case.dim + case.behind
    return (normal(case.tokens, columns), k, v, jnp.asarray(slots, jnp.int32), AttentionPrologue(rotation, *norms))


def run_kernel(case, arguments, interpret):
    """XLA would otherwise leave out roundings between the interpreter's operations, which the GPU does."""
    projected, k, v, slots, prologue = arguments
    norms = (prologue.q_norm, prologue.k_norm)
    run = functools.partial(
        attention_prologue_mosaic,
        num_heads=case.heads,
        rules=tuple(None if norm is None else norm.rule for norm in norms),
        shared_plane=v.plane is k.plane,
        interpret=interpret,
    )
    weights = tuple(None if norm is None else norm.weight for norm in norms)
    exactly = jax.jit(run, compiler_options={"xla_allow_excess_precision": False})
    return exactly(projected, k, v, slots, weights, prologue.rotation)


def run_plain_form(case, arguments):
    projected, k, v, slots, prologue = arguments

    def run(projected, k_plane, v_plane, slots):
        views = (dataclasses.replace(view, plane=plane) for view, plane in ((k, k_plane), (v, v_plane)))
        return attention_prologue(projected, *views, slots, prologue, num_heads=case.heads, implementation="reference")

    if v.plane is k.plane:
        return one_program(lambda projected, plane, slots: run(projected, plane, plane, slots))(
            projected, k.plane, slots
        )
    return one_program(run)(projected, k.plane, v.plane, slots)


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def assert_same(actual, expected):
    """All but the last bit of rare elements, where a float32 sum in another order rounds the other way."""
    for one, other in zip(actual, expected, strict=True):
        a, b = (x.typed() if isinstance(x, PageView) else x for x in (one, other))
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7)
        assert (a != b).mean() < 1e-3


@pytest.mark.parametrize("shared", [False, True], ids=["two_planes", "one_plane"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_the_plain_form(interpret, case, shared):
    arguments = problem(case, shared=shared)
    assert_same(run_kernel(case, arguments, interpret), run_plain_form(case, arguments))


def test_blocks_of_many_tiles_give_the_same_bits(interpret, monkeypatch):
    case = CASES["qwen3"]
    arguments = problem(case, dtype=jnp.float16)
    alone = run_kernel(case, arguments, interpret)
    monkeypatch.setattr(mosaic, "BLOCK_CHANNELS", ((None, 4096),))
    jax.clear_caches()
    together = run_kernel(case, arguments, interpret)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_but_live_slots_is_written(interpret):
    case = CASES["llama"]
    projected, k, v, slots, prologue = problem(case)
    _, *pages = run_kernel(case, (projected, k, v, slots, prologue), interpret)
    for before, after in zip((k, v), pages, strict=True):
        rows = [np.asarray(view.plane).reshape(-1, case.kv_heads * case.dim * 2) for view in (before, after)]
        changed = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
        live = np.asarray(slots)[np.asarray(slots) >= PAGE] + before.first_row * PAGE
        np.testing.assert_array_equal(changed, np.sort(live))


def test_a_token_depends_on_no_other_and_columns_behind_are_not_read(interpret):
    case = CASES["partial_and_gated"]
    projected, k, v, slots, prologue = problem(case)
    expected = run_kernel(case, (projected, k, v, slots, prologue), interpret)
    spoiled = projected.at[1:].set(jnp.nan).at[:, -case.behind :].set(jnp.nan)
    actual = run_kernel(case, (spoiled, k, v, slots.at[1:].set(-1), prologue), interpret)
    np.testing.assert_array_equal(actual[0][0], expected[0][0])
    row = int(slots[0])
    for one, other in zip(actual[1:], expected[1:], strict=True):
        one, other = (np.asarray(x.typed()).reshape(-1, case.kv_heads, case.dim) for x in (one, other))
        np.testing.assert_array_equal(one[row + PAGE * k.first_row], other[row + PAGE * k.first_row])


def test_blocks_cover_every_head_once():
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64), (64, 8, 64), (16, 2, 256), (28, 4, 128), (4, 1, 256)):
        for tokens in (1, 128, 129, 8192):
            parts = parts_of(tiles_of(heads, kv_heads), dim, tokens)
            assert all(parts)
            sources = [tile.source + i for part in parts for tile in part for i in range(tile.heads)]
            assert sources == list(range(heads + 2 * kv_heads))


def test_a_call_that_does_not_fit_is_refused():
    case = CASES["qwen3"]
    projected, k, v, slots, prologue = problem(case)
    call = functools.partial(attention_prologue, num_heads=case.heads)
    with pytest.raises(ValueError, match="the heads need"):
        call(projected[:, :-1], k, v, slots, prologue)
    with pytest.raises(ValueError, match="slots must be 3 integers"):
        call(projected, k, v, slots[:2], prologue)
    with pytest.raises(ValueError, match="differ"):
        call(projected, k, dataclasses.replace(v, dtype="float16"), slots, prologue)
    with pytest.raises(ValueError, match="k_norm has weights"):
        call(projected, k, v, slots, prologue._replace(k_norm=Norm(jnp.ones(64), LLAMA)))
    with pytest.raises(ValueError, match="does not fit 3 tokens"):
        call(projected, k, v, slots, prologue._replace(rotation=Rotation(jnp.ones((2, 64)), jnp.ones((2, 64)))))
    with pytest.raises(ValueError, match="'mosaic' cannot serve"):
        call(projected, k, v, slots, prologue, implementation="mosaic")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32", "kv_dtype": "float32"}, "float32 is neither"),
        ({"kv_dtype": "float8_e4m3fn"}, "pages of float8_e4m3fn differ"),
        ({"rotary_dim": 96}, "not cut into pieces of 48"),
        ({"head_dim": 96, "rotary_dim": 96}, "pieces of 48 channels"),
        ({"num_heads": 2, "num_kv_heads": 1, "rotary_dim": 16}, "not cut into vectors of 32 threads"),
    ],
)
def test_heads_that_the_kernel_cannot_take_are_refused(change, reason):
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rotary_dim": 128}
    assert reason in mosaic_refusal(**(shape | {"dtype": "bfloat16", "kv_dtype": "bfloat16"} | change))
