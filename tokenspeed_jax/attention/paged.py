"""Attention over paged caches: writes the step's keys and values, then attends over each row's pages."""

from jaxtyping import Array, Float, Int

from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.pallas_kernels.decode_attention import decode_attention
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.prefill_attention import prefill_attention


class PagedStep:
    """The `AttentionStep` of one compiled step. Lives while the step is traced.

    Plane values are threaded linearly: each layer reads and replaces its own planes in `planes`, and no older value
    is read afterwards, so that donated planes are updated in place.
    """

    def __init__(
        self,
        *,
        planes: dict[str, Array],
        arena: CacheArena,
        router: CacheGroupRouter,
        bindings: tuple[LayerBinding, ...],
        tables: dict[str, Int[Array, "rows columns"]],
        rows: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        query_starts: Int[Array, " rows_plus_1"] | None,
        kv_lens: Int[Array, " rows"],
        implementation: Implementation | None,
    ) -> None:
        """Describes the step's tokens.

        Args:
            planes: the arena's planes; replaced layer by layer.
            tables: block table of each row, per cache group.
            rows, positions: row and position of each token; row -1 for padding tokens.
            query_starts: where each row's tokens begin; None when every row has exactly one.
            kv_lens: tokens of each row after this step; 0 for a padding row.
            implementation: attention kernels to use; None takes the fastest that serves the call.
        """
        self.planes = planes
        self._arena = arena
        self._router = router
        self._bindings = bindings
        self._rows = rows
        self._positions = positions
        self._query_starts = query_starts
        self._kv_lens = kv_lens
        self._implementation: Implementation | None = implementation
        self._page_tables = router.expand(tables)

    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
    ) -> Float[Array, "tokens heads dim"]:
        """Stores `k` and `v` at their slots and attends `q`; see `models.attention.attend`."""
        binding = self._bindings[layer.layer_id]
        slots = self._router.write_locations(self._page_tables, binding, rows=self._rows, positions=self._positions)
        keys = self._store(binding.k_field, binding, slots, k)
        values = self._store(binding.v_field, binding, slots, v)
        page_table = self._page_tables[binding.group_id]
        if self._query_starts is None:
            return decode_attention(
                q,
                keys,
                values,
                page_table,
                self._kv_lens,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                soft_cap=layer.soft_cap,
                implementation=self._implementation,
            )
        return prefill_attention(
            q,
            keys,
            values,
            page_table,
            self._query_starts,
            self._kv_lens,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
            implementation=self._implementation,
        )

    def _store(
        self,
        field_id: str,
        binding: LayerBinding,
        slots: Int[Array, " tokens"],
        rows: Float[Array, "tokens heads dim"],
    ) -> PageView:
        page_size = self._router.kernel_page_size(binding.group_id)
        view = self._arena.page_view(self.planes, field_id, page_size).write(slots, rows)
        self.planes[self._arena.plan.field(field_id).plane_id] = view.plane
        return view
