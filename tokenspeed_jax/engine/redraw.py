"""Redrawing: the tokens of rows that a grammar constrains, drawn from the logits of a step that has run.

A mask depends on the token before it, and that token is on the device only when a step is dispatched. So the step runs
without drawing for such rows, the host brings their grammars up to date meanwhile, and a second, small program draws:
`(logits, device_state, outputs, buffer) -> (device_state, outputs)`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32

from tokenspeed_jax.engine.batch import (
    MIN_TOKENS,
    SAMPLES,
    BuiltBatch,
    Fields,
    fields_of,
    row_sampling,
    sampling_shapes,
)
from tokenspeed_jax.engine.sampler import sample
from tokenspeed_jax.engine.step import DeviceState, pack_outputs

_WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Words of a row's mask: one bit per id, the lowest id in the lowest bit of the first word."""
    return -(-vocab_size // _WORD_BITS)


@dataclass(frozen=True)
class RedrawLayout:
    """Where the fields of a redraw's buffer lie: how rows are sampled, and which ids each may draw."""

    rows: int
    vocab_size: int

    @cached_property
    def fields(self) -> Fields:
        return fields_of({**sampling_shapes(self.rows), "masks": (self.rows, mask_words(self.vocab_size))})

    @property
    def size(self) -> int:
        """Length of the buffer in int32 elements."""
        return max(where.stop for where, _ in self.fields.values())

    def field(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """A writable view of a field."""
        where, shape = self.fields[name]
        return buffer[where].reshape(shape)


@dataclass(frozen=True)
class Redraw:
    """The buffer of one redraw.

    Attributes:
        masks: int32[rows, words], a view of the buffer; to be filled for the rows that draw.
    """

    layout: RedrawLayout
    buffer: np.ndarray

    @classmethod
    def of(cls, built: BuiltBatch, rows: list[int], vocab_size: int) -> "Redraw":
        """A fresh buffer that draws for some rows of a batch; no id is allowed yet."""
        layout = RedrawLayout(built.layout.bucket.rows, vocab_size)
        buffer = np.zeros(layout.size, np.int32)
        view = built.layout.views(built.buffer)
        ints = layout.field(buffer, "ints")
        ints[:] = view["ints"]
        ints[SAMPLES] = 0
        ints[SAMPLES, rows] = 1
        # Whether an id may be drawn is the mask's affair: it knows when a grammar has no other way to go on.
        ints[MIN_TOKENS] = 0
        layout.field(buffer, "floats")[:] = view["floats"]
        return cls(layout, buffer)

    @property
    def masks(self) -> np.ndarray:
        return self.layout.field(self.buffer, "masks")


def build_redraw(
    layout: RedrawLayout,
) -> Callable[[jax.Array, DeviceState, jax.Array, jax.Array], tuple[DeviceState, jax.Array]]:
    """The redraw of one row count, to be jitted with `device_state` donated.

    It writes the tokens and counts of the rows it draws for, and returns the step's outputs with theirs among them.
    """

    def redraw(
        logits: Float32[Array, "rows vocab"],
        device_state: DeviceState,
        outputs: Int32[Array, "rows columns"],
        buffer: Int[Array, " size"],
    ) -> tuple[DeviceState, Int32[Array, "rows columns"]]:
        field = {name: buffer[where].reshape(shape) for name, (where, shape) in layout.fields.items()}
        rows = row_sampling(field["ints"], field["floats"])
        allowed = unpack_masks(field["masks"], layout.vocab_size)
        result, sampling = sample(logits, rows, device_state.sampling, allowed)
        # Rows that draw nothing write the padding slot.
        target = jnp.where(rows.samples, rows.slot, 0)
        last_tokens = device_state.last_tokens.at[target].set(result.token)
        state = dataclasses.replace(device_state, last_tokens=last_tokens, sampling=sampling)
        return state, jnp.where(rows.samples[:, None], pack_outputs(result), outputs)

    return redraw


def unpack_masks(masks: Int32[Array, "rows words"], vocab_size: int) -> Bool[Array, "rows vocab"]:
    """A truth value per id, from masks of one bit per id."""
    words = lax.bitcast_convert_type(masks, jnp.uint32)
    bits = (words[:, :, None] >> jnp.arange(_WORD_BITS, dtype=jnp.uint32)) & 1
    return bits.reshape(masks.shape[0], -1)[:, :vocab_size] > 0
