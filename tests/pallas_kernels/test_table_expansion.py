"""Tables and slots of all groups at once: the kernel does what the plain form does, and only live pages are named."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import table_expansion
from tokenspeed_jax.pallas_kernels.table_expansion import TableGeometry, expand_tables
from tokenspeed_jax.pallas_kernels.table_expansion.mosaic import expand_tables_mosaic

from .one_program import one_program

# Columns of each group's table, rows, tokens: tables of scalars, whole vectors, vectors with a tail, several blocks.
SHAPES = {
    "scalars": ((5, 7), 3, 9),
    "vectors": ((64, 16), 8, 3),
    "tail": ((33, 130), 5, 40),
    "blocks": ((150, 1), 8, 16),
}
GEOMETRIES = (TableGeometry(2, 16), TableGeometry(1, 64))
expand_at_once = one_program(expand_tables, geometries=GEOMETRIES)


def random_step(shape, seed):
    """Tables with holes and ragged padding, tokens with padding and positions on both sides of the table."""
    columns, rows, tokens = shape
    rng = np.random.default_rng(seed)
    tables = [rng.integers(-1, 1000, (rows, count)).astype(np.int32) for count in columns]
    for table in tables:
        table[rng.random(table.shape) < 0.3] = 0
    ends = max(count * g.block_tokens for count, g in zip(columns, GEOMETRIES, strict=True))
    token_rows = rng.integers(-1, rows + 1, tokens).astype(np.int32)
    return tables, token_rows, rng.integers(-2, ends + 3, tokens).astype(np.int32)


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kernel_equals_the_plain_form(interpret, shape):
    plain = one_program(expand_tables, geometries=GEOMETRIES, implementation="reference")
    kernel = one_program(expand_tables_mosaic, geometries=GEOMETRIES, interpret=interpret)

    @settings(max_examples=10, deadline=None)
    @given(st.integers(0, 2**31))
    def check(seed):
        tables, rows, positions = (
            tuple(map(jnp.asarray, part)) if isinstance(part, list) else jnp.asarray(part)
            for part in random_step(shape, seed)
        )
        expected = plain(tables, rows=rows, positions=positions)
        actual = kernel(tables, rows=rows, positions=positions)
        for group in range(2):
            np.testing.assert_array_equal(actual.page_tables[group], expected.page_tables[group])
            np.testing.assert_array_equal(actual.slots[group], expected.slots[group])

    check()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31))
def test_pages_and_slots_lie_in_the_rows_own_blocks_or_nowhere(seed):
    tables, rows, positions = random_step(SHAPES["scalars"], seed)
    out = expand_at_once([jnp.asarray(t) for t in tables], rows=jnp.asarray(rows), positions=jnp.asarray(positions))
    for table, geometry, pages, slots in zip(tables, GEOMETRIES, out.page_tables, out.slots, strict=True):
        owned = np.repeat(np.maximum(table, 0), geometry.pages_per_block, axis=1)
        np.testing.assert_array_equal(np.asarray(pages) // geometry.pages_per_block, owned)
        for row, position, slot in zip(rows, positions, np.asarray(slots), strict=True):
            live = 0 <= row < len(table) and 0 <= position < table.shape[1] * geometry.block_tokens
            block = table[row, position // geometry.block_tokens] if live else 0
            assert slot == (block * geometry.block_tokens + position % geometry.block_tokens if block > 0 else 0)
            # What stands for "nowhere" is in the null page, which writers drop, and so is no live slot.
            assert slot == 0 or slot >= geometry.block_tokens


def test_what_does_not_fit_is_refused_by_name(monkeypatch):
    tables, rows, positions = random_step(SHAPES["scalars"], 0)
    with pytest.raises(ValueError, match="2 block tables need as many geometries, got 1"):
        expand_tables(tables, GEOMETRIES[:1], rows, positions)
    with pytest.raises(ValueError, match=r"differ in rows: \[3, 2\]"):
        expand_tables([tables[0], tables[1][:2]], GEOMETRIES, rows, positions)
    with pytest.raises(ValueError, match="matrix of integers"):
        expand_tables([tables[0], tables[1][0]], GEOMETRIES, rows, positions)
    with pytest.raises(ValueError, match="positions must be 9 integers"):
        expand_tables(tables, GEOMETRIES, rows, positions[:-1])
    with pytest.raises(ValueError, match="must be positive"):
        TableGeometry(0, 16)
    with pytest.raises(ValueError, match="'mosaic' cannot serve this call: the default device is a cpu"):
        expand_tables(tables, GEOMETRIES, rows, positions, implementation="mosaic")
    monkeypatch.setattr(table_expansion, "hopper_refusal", lambda: None)
    assert "empty" in table_expansion.mosaic_refusal([tables[0][:, :0]], rows)
    assert "no tokens" in table_expansion.mosaic_refusal(tables, rows[:0])
    assert table_expansion.mosaic_refusal(tables, rows) is None
