"""The attention prologue for Hopper GPUs, written with Mosaic GPU: norm, rotation and cache write in one pass.

    grid: (part, token); one block = one warpgroup; a part is one or a few tiles of up to 16 heads of one token

    projected[token], heads of dim channels                        a tile, in registers
    ------------------------------------------                     --------------------
    q q q q ... | k k | v v | (not read)      --128-bit loads-->   [heads, pieces of channels]
                                                                   norm: sum of squares per head, over 8 to 32 lanes
    cos, sin [token]                          --128-bit loads-->   piece 0 and 1 turn with each other in every lane
                                                                   q: q[token, heads]       <-- stores
                                                                   k, v: plane[slot[token]] <-- stores, if slot is live

A head is loaded in pieces of half the channels that turn, so the partner of a channel lies in the same register of
the same lane and nothing moves between lanes but the sum of squares. No shared memory, no barrier: the kernel waits
for global memory alone. A token whose slot is inside the null page stores no key and no value.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.norm_rules import NormRule
from tokenspeed_jax.pallas_kernels.pages import PageView

WARPS, LANES = 4, 32  # of a warpgroup
TILE_HEADS = 16
VECTOR = 8  # 16-bit elements that a thread loads at once
# Channels that a block takes where its tiles allow, by the step's tokens: few tokens are spread over many blocks, and
# many share the loads of angles and weights. Measured on an H200 with 32 query and 8 KV heads of 128.
BLOCK_CHANNELS = ((128, 1024), (None, 4096))
# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any
Pieces = list[jax.Array]


class Tile(NamedTuple):
    """Heads that are computed together.

    Attributes:
        kind: "q", "k" or "v".
        first: head within its kind.
        source: head within the projections.
        heads: how many, a power of two.
    """

    kind: str
    first: int
    source: int
    heads: int


def tiles_of(num_heads: int, num_kv_heads: int) -> tuple[Tile, ...]:
    """The tiles of one token, in the order of the projections."""
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    tiles, source = [], 0
    for kind, count in counts.items():
        heads = min(TILE_HEADS, count & -count)
        tiles += [Tile(kind, first, source + first, heads) for first in range(0, count, heads)]
        source += count
    return tuple(tiles)


def parts_of(tiles: tuple[Tile, ...], head_dim: int, tokens: int) -> list[tuple[Tile, ...]]:
    """The tiles of each block of a token: neighbours up to the channels of `BLOCK_CHANNELS`, one tile at least."""
    most = next(channels for end, channels in BLOCK_CHANNELS if end is None or tokens <= end)
    parts: list[list[Tile]] = []
    room = 0
    for tile in tiles:
        if not parts or tile.heads * head_dim > room:
            parts.append([])
            room = most
        parts[-1].append(tile)
        room -= tile.heads * head_dim
    return [tuple(part) for part in parts]


def piece_columns(head_dim: int, rotary_dim: int | None) -> int:
    """Channels of one piece of a head."""
    return head_dim // 2 if rotary_dim is None else rotary_dim // 2


def prologue_shape_refusal(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int | None) -> str | None:
    """Why the kernel cannot take heads of this shape on any GPU; None when it can."""
    columns = piece_columns(head_dim, rotary_dim)
    if head_dim % columns:
        return f"heads of {head_dim} channels are not cut into pieces of {columns}, half of what turns"
    for tile in tiles_of(num_heads, num_kv_heads):
        lanes = LANES // max(tile.heads // WARPS, 1)
        if columns % lanes or columns & (columns - 1) or columns > lanes * VECTOR:
            return f"pieces of {columns} channels, half of what turns, are not cut into vectors of {lanes} threads"
    return None


def tile_layout(heads: int, columns: int) -> Any:
    """How a warpgroup holds [heads, columns]: a head within one warp, in vectors as long as they come out even."""
    rows = max(heads // WARPS, 1)  # of a warp
    lanes = LANES // rows  # of a head
    vector = min(VECTOR, columns // lanes)
    if rows > 1:
        tiling = plgpu.Tiling(((heads, columns), (rows, lanes * vector), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    tiling = plgpu.Tiling(((heads, columns), (vector,)))
    copies = () if heads == WARPS else (plgpu.Replicated(WARPS // heads),)
    warps = (*copies, -3) if heads > 1 else copies
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-2,), vector_dim=-1)


@functools.partial(jax.jit, static_argnames=("num_heads", "rules", "shared_plane", "interpret"))
def attention_prologue_mosaic(
    projected: Float[Array, "tokens columns"],
    k: PageView,
    v: PageView,
    slots: Int[Array, " tokens"],
    weights: tuple[Float[Array, " dim"] | None, Float[Array, " dim"] | None],
    rotation: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]] | None,
    *,
    num_heads: int,
    rules: tuple[NormRule | None, NormRule | None],
    shared_plane: bool,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads dim"], PageView, PageView]:
    """See `attention_prologue`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    tokens = projected.shape[0]
    _, kv_heads, dim = k.page_shape
    parts = parts_of(tiles_of(num_heads, kv_heads), dim, tokens)
    views = (k,) if shared_plane else (k, v)
    planes = [jax.new_ref(view.typed().reshape(-1, kv_heads, dim)) for view in views]
    given = [x for x in (*weights, *(rotation or ())) if x is not None]
    kernel = plgpu.kernel(
        functools.partial(
            _block,
            parts=parts,
            rules={"q": rules[0], "k": rules[1], "v": None},
            rotates=rotation is not None,
            first_rows={"k": k.first_row * k.tokens_per_page, "v": v.first_row * v.tokens_per_page},
            tokens_per_page=k.tokens_per_page,
            num_planes=len(planes),
        ),
        out_type=jax.ShapeDtypeStruct((tokens, num_heads, dim), projected.dtype),
        grid=(len(parts), tokens),
        # No thread reads what another one wrote, so the barriers that would be put around stores guard nothing.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=gpu.LoweringSemantics.Lane
        ),
        grid_names=("part", "token"),
        interpret=interpret,
        kernel_name="attention_prologue",
    )
    q = kernel(*planes, projected.reshape(tokens, -1, dim), slots, *given)
    raw = [lax.bitcast_convert_type(jax.freeze(plane), jnp.uint8).reshape(k.plane.shape) for plane in planes]
    return q, dataclasses.replace(k, plane=raw[0]), dataclasses.replace(v, plane=raw[-1])


def _block(
    *refs: Ref,
    parts: list[tuple[Tile, ...]],
    rules: dict[str, NormRule | None],
    rotates: bool,
    first_rows: dict[str, int],
    tokens_per_page: int,
    num_planes: int,
) -> None:
    planes, (projected, slots, *given, out) = refs[:num_planes], refs[num_planes:]
    parameters = iter(given)
    weights = {kind: next(parameters) for kind, rule in rules.items() if rule is not None}
    turns = tuple(parameters)
    token, part = lax.axis_index("token"), lax.axis_index("part")
    dim = out.shape[-1]
    columns = turns[0].shape[-1] if rotates else dim // 2
    pieces = [slice(i, i + columns) for i in range(0, dim, columns)]
    load = functools.partial(gpu.load, optimized=False)

    def load_tile(tile: Tile) -> Pieces:
        layout, heads = tile_layout(tile.heads, columns), pl.ds(tile.source, tile.heads)
        return [load(projected.at[token, heads, piece], layout=layout) for piece in pieces]

    def store_tile(slot: jax.Array, tile: Tile, values: Pieces) -> None:
        heads = pl.ds(tile.first, tile.heads)
        if tile.kind == "q":
            for piece, value in zip(pieces, values, strict=True):
                out[token, heads, piece] = value
            return
        plane = {"k": planes[0], "v": planes[-1]}[tile.kind]

        @pl.when(slot >= tokens_per_page)
        def _live() -> None:
            for piece, value in zip(pieces, values, strict=True):
                plane[slot + first_rows[tile.kind], heads, piece] = value

    def compute(members: tuple[Tile, ...]) -> None:
        # All loads come before the first store, which the compiler could not move them across.
        slot, loaded = slots[token], [load_tile(tile) for tile in members]
        per_column = {tile.heads: tile_layout(tile.heads, columns).reduce(0) for tile in members}
        turning = dict.fromkeys(tile.heads for tile in members if tile.kind != "v") if rotates else {}
        angles = {heads: [load(turn.at[token], layout=per_column[heads]) for turn in turns] for heads in turning}
        normed = dict.fromkeys((tile.kind, tile.heads) for tile in members if tile.kind in weights)
        gains = {
            (kind, heads): [load(weights[kind].at[piece], layout=per_column[heads]) for piece in pieces]
            for kind, heads in normed
        }
        for tile, values in zip(members, loaded, strict=True):
            rule, layout = rules[tile.kind], tile_layout(tile.heads, columns)
            gain, turn = gains.get((tile.kind, tile.heads)), angles.get(tile.heads)
            unit = values if rule is None or gain is None else _normed(values, gain, rule, dim, layout)
            store_tile(slot, tile, unit if turn is None or tile.kind == "v" else _turned(unit, turn, layout))

    for i, members in enumerate(parts):
        pl.when(part == i)(functools.partial(compute, members))


def _normed(pieces: Pieces, gains: Pieces, rule: NormRule, dim: int, layout: Any) -> Pieces:
    """The norm of each head, in the pieces' dtype."""
    wide = [piece.astype(jnp.float32) for piece in pieces]
    squares = functools.reduce(lambda total, piece: total + piece * piece, wide[1:], wide[0] * wide[0])
    mean = plgpu.layout_cast(squares.sum(axis=1), layout.reduce(1)) * (1.0 / dim)
    scale = _along(lax.rsqrt(mean + rule.epsilon), wide[0].shape, 0, layout)
    return [
        rule.weigh(piece * scale, _along(gain, piece.shape, 1, layout), pieces[0].dtype)
        for piece, gain in zip(wide, gains, strict=True)
    ]


def _turned(pieces: Pieces, turn: Pieces, layout: Any) -> Pieces:
    """The pieces after the first two turned by cosines and sines, computed in float32."""
    first, second, *rest = pieces
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = (_along(angle, a.shape, 1, layout) for angle in turn)
    return [(a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(first.dtype), *rest]


def _along(vector: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """The vector along one axis of a tile; layouts are said wherever they are known, which spares a search for them."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), layout)
