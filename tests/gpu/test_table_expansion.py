"""The table kernel on a Hopper GPU against its plain form, at the shapes of decode and prefill steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.implementations import hopper_refusal
from tokenspeed_jax.pallas_kernels.table_expansion import TableGeometry, expand_tables

# Columns and (pages per block, page size) of each group, rows, tokens.
STEPS = {
    "one_row": (((5, (1, 64)),), 1, 1),
    "decode": (((130, (1, 64)), (130, (1, 64))), 64, 64),
    "wide_decode": (((2048, (1, 64)), (1024, (4, 64)), (33, (2, 16))), 256, 256),
    "prefill": (((7, (4, 64)), (20, (1, 64))), 4, 8192),
    "odd": (((129, (3, 64)), (43, (1, 32))), 3, 4097),
}


@pytest.fixture(autouse=True)
def _hopper():
    refusal = hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def arguments(groups, rows, tokens, seed=0):
    rng = np.random.default_rng(seed)
    tables = [rng.integers(-1, 100_000, (rows, columns)).astype(np.int32) for columns, _ in groups]
    for table in tables:
        table[rng.random(table.shape) < 0.3] = 0
    end = max(columns * pages * size for columns, (pages, size) in groups)
    token_rows = rng.integers(-1, rows + 1, tokens).astype(np.int32)
    positions = rng.integers(-2, end + 3, tokens).astype(np.int32)
    return tuple(map(jnp.asarray, tables)), jnp.asarray(token_rows), jnp.asarray(positions)


def compiled(groups, implementation, tables, rows, positions):
    geometries = tuple(TableGeometry(*geometry) for _, geometry in groups)
    function = functools.partial(expand_tables, implementation=implementation)
    return jax.jit(lambda t, r, p: function(t, geometries, r, p)).lower(tables, rows, positions).compile()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_kernel_equals_the_plain_form(step):
    for seed in range(3):
        given = arguments(*step, seed=seed)
        expected, actual = (compiled(step[0], name, *given)(*given) for name in ("reference", None))
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_all_groups_take_one_launch():
    """Nothing but the kernel's call: views of tables and pages are free."""
    step = STEPS["wide_decode"]
    text = compiled(step[0], None, *arguments(*step)).as_text()
    entry = text[text.index("ENTRY") :]
    assert entry.count(" custom-call(") == 1
    assert " fusion(" not in entry
    assert " copy(" not in entry
