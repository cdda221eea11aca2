"""Residual norm and attention prologue on a Hopper GPU against their plain forms, at the shapes that models have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.add_norm import add_norm
from tokenspeed_jax.pallas_kernels.attention_prologue import AttentionPrologue, attention_prologue
from tokenspeed_jax.pallas_kernels.implementations import hopper_refusal
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.rotation import Rotation

PAGE = 64
# Or XLA leaves out roundings between two operations of the plain form.
jit_exactly = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
LLAMA, OLMO, GEMMA = NormRule(1e-6), NormRule(1e-5, rounds_first=False), NormRule(1e-6, False, gain_offset=1.0)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of one layer, and what is done to them."""

    heads: int
    kv_heads: int
    dim: int
    rotary: int | None
    rule: NormRule | None
    behind: int = 0  # columns behind the values


MODELS = {
    "qwen3_8b": Heads(32, 8, 128, 128, LLAMA),
    "qwen3_30b_a3b": Heads(32, 4, 128, 128, LLAMA),
    "llama_8b": Heads(32, 8, 128, 128, None),
    "smollm2_135m": Heads(9, 3, 64, 64, None),
    "gemma3_270m": Heads(4, 1, 256, 256, GEMMA),
    "gemma3_12b": Heads(16, 8, 256, 256, GEMMA),
    "gpt_oss_20b": Heads(64, 8, 64, 64, None),
    "qwen3_next": Heads(16, 2, 256, 64, GEMMA, behind=4096),
    "olmo_heads_unrotated": Heads(28, 4, 128, None, OLMO),
}


@pytest.fixture(autouse=True)
def _hopper():
    refusal = hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(jax.random.key(seed), shape, dtype)


def assert_close(actual, expected, tolerance=5e-4):
    """Relative error in the norm: some elements round the other way, where a float32 sum ran in another order."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def problem(case, tokens, pages=None):
    """Arguments: distinct slots in random order, of which every fifth is in the null page and every seventh none."""
    pages = pages or tokens // PAGE + 8
    planes = [PageView.from_array(normal(i, pages, PAGE, case.kv_heads, case.dim)) for i in (1, 2)]
    slots = PAGE + np.random.default_rng(tokens).permutation((pages - 1) * PAGE)[:tokens]
    slots[4::5], slots[6::7] = 3, -1
    # Biased, as projections of gpt-oss are.
    projected = normal(3, tokens, (case.heads + 2 * case.kv_heads) * case.dim + case.behind) + 0.25
    norms = [None if case.rule is None else Norm(1 + 0.1 * normal(i, case.dim), case.rule) for i in (4, 5)]
    angles = 30 * normal(6, tokens, (case.rotary or 0) // 2, dtype=jnp.float32)
    rotation = None if case.rotary is None else Rotation(jnp.cos(angles), jnp.sin(angles))
    return projected, *planes, jnp.asarray(slots, jnp.int32), AttentionPrologue(rotation, *norms)


def run(case, arguments, implementation):
    """Queries, and the pages of k and v as arrays."""
    projected, k, v, slots, (rotation, q_norm, k_norm) = arguments
    weights = [None if norm is None else norm.weight for norm in (q_norm, k_norm)]

    @jit_exactly
    def call(projected, k, v, slots, rotation, weights):
        norms = [None if weight is None else Norm(weight, case.rule) for weight in weights]
        q, k, v = attention_prologue(
            projected, k, v, slots, AttentionPrologue(rotation, *norms), num_heads=case.heads,
            implementation=implementation,
        )  # fmt: skip
        return q, k.typed(), v.typed()

    return call(projected, k, v, slots, rotation, weights)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [*((model, tokens) for model in MODELS for tokens in (67, 300)), ("qwen3_8b", 1), ("qwen3_8b", 4099)],
)
def test_prologue_equals_the_plain_form(model, tokens):
    case = MODELS[model]
    arguments = problem(case, tokens)
    actual, expected = (run(case, arguments, name) for name in ("mosaic", "reference"))
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
    live = np.asarray(arguments[3])
    for before, after in zip(arguments[1:3], actual[1:], strict=True):
        rows = [np.asarray(x.astype(jnp.float32)).reshape(-1, case.kv_heads, case.dim) for x in (before.typed(), after)]
        changed = np.flatnonzero((rows[0] != rows[1]).any(axis=(1, 2)))
        np.testing.assert_array_equal(changed, np.sort(live[live >= PAGE]))


def test_fields_of_one_plane_are_both_written():
    case = MODELS["qwen3_8b"]
    projected, k, _, slots, prologue = problem(case, 64, pages=40)
    # The pages of k begin at the plane's first page, those of v at its 21st.
    slots = jnp.where(slots >= PAGE, PAGE + slots % (10 * PAGE), slots)
    slots = jnp.asarray(np.unique(np.asarray(slots)), jnp.int32)
    tokens = slots.shape[0]
    prologue = prologue._replace(rotation=Rotation(*(x[:tokens] for x in prologue.rotation)))

    def call(implementation, plane):
        first, second = (dataclasses.replace(k, plane=plane, first_row=row) for row in (0, 20))
        q, first, second = attention_prologue(
            projected[:tokens], first, second, slots, prologue, num_heads=case.heads, implementation=implementation
        )
        assert first.plane is second.plane
        return q, first.typed()

    actual, expected = (jit_exactly(functools.partial(call, name))(k.plane) for name in ("mosaic", "reference"))
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
    assert (np.asarray(actual[1], np.float32) != np.asarray(k.typed(), np.float32)).any(axis=(1, 2, 3)).sum() > 10


def test_slots_beyond_two_to_the_31_elements_are_written():
    case = MODELS["llama_8b"]
    pages = (2**31 + 2**26) // (PAGE * case.kv_heads * case.dim)
    projected, _, _, _, prologue = problem(case, 5)
    last = (pages - 1) * PAGE - 1
    slots = jnp.asarray([last, PAGE, last - 131, last // 2 + 9, last - 64 * PAGE], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(plane):
        k = PageView(plane, (PAGE, case.kv_heads, case.dim), "bfloat16")
        v = dataclasses.replace(k, first_row=1)
        _, k, v = attention_prologue(projected, k, v, slots, prologue, num_heads=case.heads, implementation="mosaic")
        rows = v.typed().reshape(-1, case.kv_heads, case.dim)
        return rows[slots], rows[slots + PAGE], jnp.count_nonzero(jnp.any(rows != 0, axis=(1, 2))), v.plane

    keys, values, count, _ = call(jnp.zeros((pages, PAGE * case.kv_heads * case.dim * 2), jnp.uint8))
    assert int(count) == 10
    _, *expected = prologue.heads(projected, case.heads, case.kv_heads, case.dim)
    for one, other in zip((keys, values), expected, strict=True):
        assert_close(one, other)


def test_the_same_call_gives_the_same_bits_and_tokens_are_their_own():
    case = MODELS["qwen3_8b"]
    projected, k, v, slots, (rotation, q_norm, k_norm) = problem(case, 300)
    one, other = (run(case, (projected, k, v, slots, AttentionPrologue(rotation, q_norm, k_norm)), None) for _ in "ab")
    jax.tree.map(np.testing.assert_array_equal, one, other)
    few = (projected[:64], k, v, slots[:64], AttentionPrologue(Rotation(*(x[:64] for x in rotation)), q_norm, k_norm))
    np.testing.assert_array_equal(run(case, few, None)[0], one[0][:64])


@pytest.mark.parametrize("rule", [LLAMA, OLMO, GEMMA], ids=["llama", "olmo", "gemma"])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 4096), (64, 4096), (256, 2048), (5000, 5120), (33, 768)])
def test_add_norm_equals_the_plain_form(tokens, dim, rule):
    x, update, weight = normal(1, tokens, dim), normal(2, tokens, dim), 1 + 0.1 * normal(3, dim)

    def call(implementation, x, update, weight):
        return add_norm(x, update, Norm(weight, rule), implementation=implementation)

    actual, expected = (
        jit_exactly(functools.partial(call, name))(x, update, weight) for name in ("mosaic", "reference")
    )
    np.testing.assert_array_equal(actual[0], expected[0])
    assert_close(actual[1], expected[1])


@pytest.mark.parametrize("rule", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_gradients_of_add_norm_are_those_of_the_plain_form(rule):
    x, update, weight = normal(1, 64, 1024), normal(2, 64, 1024), 1 + 0.1 * normal(3, 1024)
    outer = normal(4, 64, 1024), normal(5, 64, 1024)

    def gradients(implementation):
        def call(x, update, weight):
            return add_norm(x, update, Norm(weight, rule), implementation=implementation)

        return jit_exactly(lambda *arguments: jax.vjp(call, *arguments)[1](outer))(x, update, weight)

    for one, other in zip(gradients("mosaic"), gradients("reference"), strict=True):
        assert_close(one, other, 4e-3)
