"""`RecurrentRows`: the packed tokens of a step as recurrent layers walk them, and the plain walk token by token.

A row's tokens stand one after another. Its *body* ends at the checkpoint inside the step, its *tail* is what follows
(cache-runtime.md 17). Each token is evaluated once: the tail starts from the state at the body's end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentRows:
    """Rows of one step.

    Attributes:
        starts: row r's tokens are [starts[r], starts[r + 1]); tokens beyond the last start belong to no row.
        body_lengths: tokens of each row before its checkpoint, from 1 to its length; the row's length where it has
            none, and 0 for an empty row.
    """

    starts: Int[Array, " rows_and_end"]
    body_lengths: Int[Array, " rows"]

    @classmethod
    def without_checkpoints(cls, starts: Int[Array, " rows_and_end"]) -> "RecurrentRows":
        """Rows whose body is all of them."""
        return cls(starts, starts[1:] - starts[:-1])

    @classmethod
    def of_segments(cls, segment_ids: Int[Array, " tokens"], num_segments: int) -> "RecurrentRows":
        """One row per run of equal ids; `num_segments` is the number of runs, or more."""
        change = jnp.concatenate([jnp.ones(1, bool), segment_ids[1:] != segment_ids[:-1]])
        starts = jnp.flatnonzero(change, size=num_segments, fill_value=segment_ids.shape[0])
        end = jnp.full(1, segment_ids.shape[0], starts.dtype)
        return cls.without_checkpoints(jnp.concatenate([starts, end]).astype(jnp.int32))

    @property
    def num_rows(self) -> int:
        return self.body_lengths.shape[0]

    @property
    def lengths(self) -> Int[Array, " rows"]:
        """Tokens of each row."""
        return self.starts[1:] - self.starts[:-1]

    def row_of_token(self, num_tokens: int) -> Int[Array, " tokens"]:
        """Row of each token; `num_rows` for tokens of no row."""
        token = jnp.arange(num_tokens, dtype=self.starts.dtype)
        return jnp.searchsorted(self.starts[1:], token, side="right").astype(jnp.int32)


class RecurrentResult(NamedTuple):
    """What a recurrence makes of a step's rows; the caller stores the states.

    Attributes:
        output: per token; anything for tokens of no row.
        body_states: state of each row at the end of its body; anything for an empty row.
        final_states: state of each row after its last token; its initial state for an empty row.
    """

    output: Float[Array, "tokens ..."]
    body_states: Float[Array, "rows ..."]
    final_states: Float[Array, "rows ..."]


def check_matrix_states(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    state_shape: tuple[int, ...],
) -> None:
    """Raises ValueError where queries, keys, values and states [heads, value_dim, key_dim] do not fit together."""
    tokens, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1:]
    if k.shape != q.shape or q.shape[0] != tokens or heads % key_heads:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
    if tuple(state_shape) != (heads, value_dim, key_dim):
        raise ValueError(f"states have shape {tuple(state_shape)}, expected {(heads, value_dim, key_dim)}")


Recurrence = Callable[[Any, Array, RecurrentRows], RecurrentResult]


def with_gradients(form: Recurrence, of: Recurrence) -> Recurrence:
    """`form`, with the gradients of `of`, which computes the same.

    Loops that end with the last live chunk, and kernels, have no gradients of their own. Between the passes only the
    arguments are kept.
    """

    def backward(arguments: tuple[Any, Array, RecurrentRows], gradients: RecurrentResult) -> tuple[Any, Array, None]:
        inputs, initial_states, rows = arguments
        _, pull = jax.vjp(lambda inputs, states: of(inputs, states, rows), inputs, initial_states)
        return (*pull(gradients), None)

    recurrence = jax.custom_vjp(form)
    recurrence.defvjp(lambda *arguments: (form(*arguments), arguments), backward)
    return recurrence


def scan_tokens(
    step: Callable[[Array, Any], tuple[Array, Array]],
    inputs: Any,
    initial_states: Float[Array, "rows ..."],
    rows: RecurrentRows,
) -> RecurrentResult:
    """The definition of every recurrence here: one token after another.

    Args:
        step: (state, one token's inputs) -> (state after the token, its output).
        inputs: a pytree of arrays whose first axis is tokens.
    """
    num_tokens = jax.tree.leaves(inputs)[0].shape[0]
    row_of = rows.row_of_token(num_tokens)
    body_ends, ends = rows.starts[:-1] + rows.body_lengths - 1, rows.starts[1:] - 1

    def visit(carry: tuple[Array, Array, Array], item: tuple[Array, Array, Any]) -> tuple[tuple, Array]:
        state, bodies, finals = carry
        token, row, token_inputs = item
        state = jnp.where(token == rows.starts[row], initial_states.at[row].get(mode="clip"), state)
        state, output = step(state, token_inputs)
        bodies = bodies.at[jnp.where(token == body_ends.at[row].get(mode="clip"), row, rows.num_rows)].set(
            state, mode="drop"
        )
        finals = finals.at[jnp.where(token == ends.at[row].get(mode="clip"), row, rows.num_rows)].set(
            state, mode="drop"
        )
        return (state, bodies, finals), output

    first = jnp.zeros(initial_states.shape[1:], initial_states.dtype)
    items = (jnp.arange(num_tokens, dtype=jnp.int32), row_of, inputs)
    (_, bodies, finals), output = lax.scan(visit, (first, initial_states, initial_states), items)
    return RecurrentResult(output, bodies, finals)
