"""The gated delta rule by chunks of 64 tokens in Triton, called through jax-triton: two kernels.

    terms    grid: (chunk, head)
             q, k, gates of the chunk ---> P [64, 64]: q_i k_j under the decay from j to i, j <= i
                                           M [64, 64] = (I + A)^-1 diag(beta), A = beta_i k_i k_j decay(j, i), j < i
                                           M, P M, decays of the chunk; with a decay a channel also q and k under them

    walk     grid: (part of the values, head, row); one block = 4 warps, the state S [64 values, K] in registers
             initial[row, head, part] ---> S
             per chunk, its tiles copied ahead by the compiler's pipeline (TMA):
                 X^T = v^T - S (k decayed to its token)^T          S as left operand, from registers
                 D^T = X^T M^T
                 out^T = S (q decayed)^T + X^T (P M)^T
                 S = S decay + D^T (k decayed to the chunk's end)
             states[body or row] <-------- S

With values as the rows of every product the state and the updates are left operands, which come from registers: the
accumulator of one product is the operand of the next. The inverse is applied in the walk, to the difference of a value
and what the state holds of it, so that no term of a chunk but M and P M is stored where one gate decays a whole head.

Decays between tokens are differences of running sums over the chunk. A token's log decay is cut at `LOWEST_DECAY`, so
the sums stay small enough for float32 to resolve, and what passes such a token is below 1e-17 of what came.
"""

# Without the package, pyright takes `import triton` for this file.
# pyright: reportAttributeAccessIssue=false

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Array, Float, Int, Shaped

from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows
from tokenspeed_jax.pallas_kernels.triton_calls import tiles, triton_call

Inputs = tuple[Array, Array, Array, Array, Array]  # q, k, v, log decay, beta

CHUNK = 64
TILE = 64  # values that one block of the walk holds
LOWEST_DECAY = -40.0


@dataclasses.dataclass(frozen=True)
class DeltaRuleTiling:
    """How the kernels are cut; the results do not depend on it.

    Attributes:
        stages: depth of the walk's pipeline over chunks.
        head_warps, channel_warps: of one block of the terms, with a decay a head and with one a channel.
        channels: that one block of the terms with a decay a channel holds at a time.
        joined: whether the walk multiplies by P M and M in one product.
    """

    stages: int = 3
    head_warps: int = 4
    channel_warps: int = 4
    channels: int = 32
    joined: bool = True


def gated_delta_rule_triton(
    inputs: Any,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    *,
    tiling: DeltaRuleTiling | None = None,
) -> RecurrentResult:
    """See `gated_delta_rule`; q and k are rounded to v's dtype, tokens of no row come out as zeros."""
    tiling = tiling or DeltaRuleTiling()
    narrow, wide = inputs.v.dtype, jnp.float32
    q, k, v, log_decay, beta = inputs
    inputs = (q.astype(narrow), k.astype(narrow), v, log_decay.astype(wide), beta.astype(wide))
    tokens = v.shape[0]
    spans, bounds = cut(rows, tokens)
    result = walk(inputs, chunk_terms(inputs, spans, tiling), initial_states, rows, bounds, tiling)
    # The kernel leaves them as the memory was, which may be NaN; what reads the output next reads this along.
    owned = jnp.arange(tokens) < rows.starts[-1]
    return result._replace(output=jnp.where(owned[:, None, None], result.output, 0))


def chunk_terms(inputs: Inputs, spans: Int[Array, "chunks 2"], tiling: DeltaRuleTiling) -> tuple[Array, ...]:
    """M and P M of each chunk, one below the other, and its decay; then decayed q, k, k of a channel's decay, or a
    head's decays to token and end."""
    q, k, v, log_decay, beta = inputs
    heads, (key_heads, key_dim) = v.shape[1], k.shape[1:]
    channels, shape = log_decay.ndim == 3, (spans.shape[0], heads)
    tile = jax.ShapeDtypeStruct((*shape, CHUNK, key_dim), v.dtype)
    vector = jax.ShapeDtypeStruct((*shape, CHUNK), jnp.float32)
    return triton_call(
        q,
        k,
        log_decay,
        beta,
        spans,
        kernel=channel_terms_kernel if channels else head_terms_kernel,
        out_type=(
            jax.ShapeDtypeStruct((*shape, 2 * CHUNK, CHUNK), v.dtype),
            jax.ShapeDtypeStruct((*shape, key_dim if channels else 1), jnp.float32),
            *((tile,) * 3 if channels else (vector,) * 2),
        ),
        grid=shape,
        name="delta_rule_terms",
        num_warps=tiling.channel_warps if channels else tiling.head_warps,
        num_stages=1,
        LOWEST=LOWEST_DECAY,
        HEADS=heads,
        KEY_HEADS=key_heads,
        K=key_dim,
        **({"CHANNELS": tiling.channels} if channels else {}),
    )


def walk(
    inputs: Inputs,
    terms: tuple[Array, ...],
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    bounds: Int[Array, "3 rows"],
    tiling: DeltaRuleTiling,
) -> RecurrentResult:
    """What the terms of `chunk_terms` make of the rows' states."""
    q, k, v, log_decay, _ = inputs
    heads, value_dim, (key_heads, key_dim) = *v.shape[1:], k.shape[1:]
    channels = log_decay.ndim == 3
    joint, decay, *others = terms
    readers = others if channels else (q, k, k)
    vectors = (decay, decay) if channels else others  # the kernel of a channel's decays reads none
    out, states = triton_call(
        *(tiles(matrix(x), (CHUNK, key_dim)) for x in readers),
        tiles(matrix(v), (CHUNK, TILE)),
        tiles(matrix(joint), (2 * CHUNK if tiling.joined else CHUNK, CHUNK)),
        q,
        k,
        v,
        *vectors,
        decay,
        initial_states.astype(jnp.float32),
        rows.starts.astype(jnp.int32),
        rows.body_lengths.astype(jnp.int32),
        bounds,
        kernel=walk_kernel,
        out_type=(
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct((2, *initial_states.shape), jnp.float32),
        ),
        grid=(value_dim // TILE, heads, rows.num_rows),
        name="delta_rule_walk",
        num_warps=4,
        HEADS=heads,
        KEY_HEADS=key_heads,
        K=key_dim,
        V=value_dim,
        PART=TILE,
        CHANNELS=channels,
        JOINED=tiling.joined,
        STAGES=tiling.stages,
    )
    return RecurrentResult(out, states[0], states[1])


def matrix(x: Shaped[Array, "..."]) -> Shaped[Array, "rows columns"]:
    """Tokens, or the rows of each chunk's tiles, as rows."""
    return x.reshape(-1, x.shape[-1] if x.ndim == 4 else math.prod(x.shape[1:]))


def cut(rows: RecurrentRows, tokens: int) -> tuple[Int[Array, "chunks 2"], Int[Array, "3 rows"]]:
    """Chunks of bodies and tails: (first token and number of tokens of each, 0 tokens beyond the last; first chunk of
    each row's body, of its tail, and of what follows the row)."""
    capacity = -(-tokens // CHUNK) + 2 * rows.num_rows
    bodies, starts = rows.body_lengths.astype(jnp.int32), rows.starts[:-1].astype(jnp.int32)
    lengths = jnp.stack([bodies, rows.lengths.astype(jnp.int32) - bodies], axis=1).reshape(-1)
    begins = jnp.stack([starts, starts + bodies], axis=1).reshape(-1)
    pieces = (lengths + CHUNK - 1) // CHUNK
    ends = jnp.cumsum(pieces)
    firsts = ends - pieces
    chunk = jnp.arange(capacity, dtype=jnp.int32)[:, None]
    # Exactly one part holds a live chunk, none a dead one.
    holds = (firsts <= chunk) & (chunk < ends)
    offset = (chunk - firsts) * CHUNK
    first = jnp.sum(jnp.where(holds, begins + offset, 0), axis=1)
    count = jnp.sum(jnp.where(holds, jnp.minimum(lengths - offset, CHUNK), 0), axis=1)
    pairs = firsts.reshape(-1, 2)
    return jnp.stack([first, count], axis=1), jnp.stack([pairs[:, 0], pairs[:, 1], ends.reshape(-1, 2)[:, 1]])


@triton.jit
def unit_lower_inverse(a):
    """Inverse of I + a, a [64, 64] below its diagonal: blocks of 2 tokens, joined to 4, 8, 16, 32, 64.

    Its entries do not exceed those of keys' products for keys of length 1, so float16 holds them.
    """
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -a, 0.0))
    for level in range(1, 6):
        low = tl.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level)), a, 0.0)
        narrow = x.to(tl.float16)
        through = tl.dot(narrow, low.to(tl.float16)).to(tl.float16)
        x = x - tl.dot(through, narrow)
    return x


@triton.jit
def store_joint(joint_ptr, place, a, products, beta):
    """M = (I + a)^-1 diag(beta) and P M below it."""
    dtype: tl.constexpr = joint_ptr.dtype.element_ty
    inverse = (unit_lower_inverse(a) * beta[None, :]).to(dtype)
    square = place * 8192 + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(joint_ptr + square, inverse)
    tl.store(joint_ptr + square + 4096, tl.dot(products.to(dtype), inverse).to(dtype))


@triton.jit
def head_terms_kernel(
    q_ptr, k_ptr, gate_ptr, beta_ptr, spans_ptr,
    joint_ptr, decay_ptr, to_token_ptr, to_end_ptr,
    LOWEST: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(spans_ptr + 2 * chunk), tl.load(spans_ptr + 2 * chunk + 1)
    if count == 0:
        return
    slot, channel = tl.arange(0, 64), tl.arange(0, K)
    held = slot < count
    token = (first + slot).to(tl.int64)
    gate = tl.load(gate_ptr + token * HEADS + head, mask=held, other=0.0)
    beta = tl.load(beta_ptr + token * HEADS + head, mask=held, other=0.0)
    sums = tl.cumsum(tl.maximum(gate, LOWEST), axis=0)
    total = tl.sum(tl.maximum(gate, LOWEST), axis=0)
    place = (chunk * HEADS + head).to(tl.int64)
    tl.store(decay_ptr + place, tl.exp(total))
    tl.store(to_token_ptr + place * 64 + slot, tl.exp(sums))
    tl.store(to_end_ptr + place * 64 + slot, tl.exp(tl.minimum(total - sums, 0.0)))

    tile = token[:, None] * (KEY_HEADS * K) + (head // (HEADS // KEY_HEADS)) * K + channel[None, :]
    k = tl.load(k_ptr + tile, mask=held[:, None], other=0.0)
    q = tl.load(q_ptr + tile, mask=held[:, None], other=0.0)
    i, j = slot[:, None], slot[None, :]
    decay = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    a = tl.where(i > j, tl.dot(k, tl.trans(k)) * decay * beta[:, None], 0.0)
    products = tl.where(i >= j, tl.dot(q, tl.trans(k)) * decay, 0.0)
    store_joint(joint_ptr, place, a, products, beta)


@triton.jit
def channel_terms_kernel(
    q_ptr, k_ptr, gate_ptr, beta_ptr, spans_ptr,
    joint_ptr, decay_ptr, q_out_ptr, k_read_ptr, k_write_ptr,
    LOWEST: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """A pair of tokens meets where the smallest aligned block that holds both has its middle: decays up to there and
    from there on are both at most 1."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(spans_ptr + 2 * chunk), tl.load(spans_ptr + 2 * chunk + 1)
    if count == 0:
        return
    slot = tl.arange(0, 64)
    held = slot < count
    token = (first + slot).to(tl.int64)
    beta = tl.load(beta_ptr + token * HEADS + head, mask=held, other=0.0)
    place = (chunk * HEADS + head).to(tl.int64)
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    i, j = slot[:, None], slot[None, :]
    products, a = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
    for block in range(K // CHANNELS):
        channel = block * CHANNELS + tl.arange(0, CHANNELS)
        gates = token[:, None] * (HEADS * K) + head * K + channel[None, :]
        gate = tl.maximum(tl.load(gate_ptr + gates, mask=held[:, None], other=0.0), LOWEST)
        sums = tl.cumsum(gate, axis=0)
        total = tl.sum(gate, axis=0)
        tile = token[:, None] * (KEY_HEADS * K) + (head // (HEADS // KEY_HEADS)) * K + channel[None, :]
        k = tl.load(k_ptr + tile, mask=held[:, None], other=0.0).to(tl.float32)
        q = tl.load(q_ptr + tile, mask=held[:, None], other=0.0).to(tl.float32)
        tl.store(decay_ptr + place * K + channel, tl.exp(total))
        target = place * (64 * K) + slot[:, None] * K + channel[None, :]
        to_token = tl.exp(sums)
        tl.store(q_out_ptr + target, (q * to_token).to(dtype))
        tl.store(k_read_ptr + target, (k * to_token).to(dtype))
        tl.store(k_write_ptr + target, (k * tl.exp(tl.minimum(total[None, :] - sums, 0.0))).to(dtype))
        products += tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
        for level in range(6):
            middle = ((slot >> (level + 1)) << (level + 1)) + (1 << level) - 1
            held_sums = tl.gather(sums, tl.broadcast_to(middle[:, None], [64, CHANNELS]), axis=0)
            # Both signs are decays: from the middle to a token behind it, and from one before it to the middle.
            decay = tl.exp(-tl.abs(sums - held_sums))
            queries, keys = (q * decay).to(dtype), (k * decay).to(dtype)
            pairs = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))
            products += tl.where(pairs, tl.dot(queries, tl.trans(keys)), 0.0)
            a += tl.where(pairs, tl.dot(keys, tl.trans(keys)), 0.0)
    store_joint(joint_ptr, place, a * beta[:, None], products, beta)


@triton.jit
def walk_kernel(
    q_tiles, k_read_tiles, k_write_tiles, v_tiles, joint_tiles,
    q_ptr, k_ptr, v_ptr, to_token_ptr, to_end_ptr, decay_ptr,
    initial_ptr, starts_ptr, bodies_ptr, bounds_ptr, out_ptr, states_ptr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    PART: tl.constexpr, CHANNELS: tl.constexpr, JOINED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, channel, value = tl.arange(0, 64), tl.arange(0, K), part * PART + tl.arange(0, PART)
    key_head = head // (HEADS // KEY_HEADS)
    tile_state = (head * V + value)[:, None] * K + channel[None, :]
    state = tl.load(initial_ptr + row.to(tl.int64) * (HEADS * V * K) + tile_state)
    start, stop, body = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1), tl.load(bodies_ptr + row)
    rows = tl.num_programs(2)
    for section in range(2):
        chunk = tl.load(bounds_ptr + section * rows + row)
        first = start + section * body
        last = stop + (section - 1) * (stop - start - body)
        full = (last - first) // 64
        for step in tl.range(0, full, num_stages=STAGES):
            offset = first + step * 64
            place = (chunk + step) * HEADS + head
            if CHANNELS:
                q = q_tiles.load([place * 64, 0])
                k_read = k_read_tiles.load([place * 64, 0])
                k_write = k_write_tiles.load([place * 64, 0])
            else:
                q = q_tiles.load([offset, key_head * K])
                k_read = k_read_tiles.load([offset, key_head * K])
                k_write = k_read
            v = v_tiles.load([offset, head * V + part * PART])
            joint = joint_tiles.load([place * 128, 0])
            below = joint if JOINED else joint_tiles.load([place * 128 + 64, 0])
            state, out = one_chunk(
                state, q, k_read, k_write, v, joint, below,
                to_token_ptr, to_end_ptr, decay_ptr, place.to(tl.int64), K, CHANNELS, JOINED,
            )  # fmt: skip
            token = (offset + slot).to(tl.int64)
            tl.store(out_ptr + token[:, None] * (HEADS * V) + head * V + value[None, :], out)
        offset = first + full * 64
        if offset < last:
            # What follows the section's last token is another's and stays unread: 0 * NaN is not 0.
            place = (chunk + full) * HEADS + head
            token = (offset + slot).to(tl.int64)
            held = (offset + slot < last)[:, None]
            if CHANNELS:
                q = q_tiles.load([place * 64, 0])
                k_read = k_read_tiles.load([place * 64, 0])
                k_write = k_write_tiles.load([place * 64, 0])
            else:
                tile = token[:, None] * (KEY_HEADS * K) + key_head * K + channel[None, :]
                q = tl.load(q_ptr + tile, mask=held, other=0.0)
                k_read = tl.load(k_ptr + tile, mask=held, other=0.0)
                k_write = k_read
            values = token[:, None] * (HEADS * V) + head * V + value[None, :]
            v = tl.load(v_ptr + values, mask=held, other=0.0)
            joint = joint_tiles.load([place * 128, 0])
            below = joint if JOINED else joint_tiles.load([place * 128 + 64, 0])
            state, out = one_chunk(
                state, q, k_read, k_write, v, joint, below,
                to_token_ptr, to_end_ptr, decay_ptr, place.to(tl.int64), K, CHANNELS, JOINED,
            )  # fmt: skip
            tl.store(out_ptr + values, out, mask=held)
        tl.store(states_ptr + (section * rows + row).to(tl.int64) * (HEADS * V * K) + tile_state, state)


@triton.jit
def one_chunk(
    state, q, k_read, k_write, v, joint, below, to_token_ptr, to_end_ptr, decay_ptr, place,
    K: tl.constexpr, CHANNELS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """(state before a chunk, its tiles) -> (state after it, its outputs)."""
    dtype: tl.constexpr = v.dtype
    narrow = state.to(dtype)
    seen = tl.dot(narrow, tl.trans(k_read))
    out = tl.dot(narrow, tl.trans(q))
    if CHANNELS:
        decay = tl.load(decay_ptr + place * K + tl.arange(0, K))[None, :]
    else:
        to_token = tl.load(to_token_ptr + place * 64 + tl.arange(0, 64))[None, :]
        decay = tl.load(decay_ptr + place)
        seen *= to_token
        out *= to_token
    difference = (tl.trans(v).to(tl.float32) - seen).to(dtype)
    if JOINED:
        both = tl.dot(difference, tl.trans(joint))
        update, more = tl.split(tl.permute(tl.reshape(both, [state.shape[0], 2, 64]), (0, 2, 1)))
        out += more
    else:
        update = tl.dot(difference, tl.trans(joint))
        out = tl.dot(difference, tl.trans(below), acc=out)
    if not CHANNELS:
        update *= tl.load(to_end_ptr + place * 64 + tl.arange(0, 64))[None, :]
    state = tl.dot(update.to(dtype), k_write, acc=state * decay)
    return state, tl.trans(out).to(dtype)
