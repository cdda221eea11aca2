"""The step of serving: layers write the caches of the step's tokens, and read those of everything before."""

from jaxtyping import Array, Float, Int

from tokenspeed_jax.attention.latent import attend_latent_pages
from tokenspeed_jax.attention.recurrent import convolve_cached, recur_cached
from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.cache.state_blocks import StateBlocks
from tokenspeed_jax.models.attention import (
    AttentionSpec,
    LatentAttentionSpec,
    LatentExpansion,
    RecurrenceInputs,
    RecurrentSpec,
)
from tokenspeed_jax.pallas_kernels.attention_prologue import AttentionPrologue, attention_prologue
from tokenspeed_jax.pallas_kernels.decode_attention import decode_attention
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.prefill_attention import prefill_attention
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows


class PagedStep:
    """The `AttentionStep` of one compiled step. Lives while the step is traced.

    Plane values are threaded linearly: each layer reads and replaces its own planes in `planes`, and no older value
    is read afterwards, so that donated planes are updated in place.

    Attributes:
        expert_ids: by layer, the experts that the step's tokens went to.
    """

    def __init__(
        self,
        *,
        planes: dict[str, Array],
        arena: CacheArena,
        router: CacheGroupRouter,
        bindings: tuple[LayerBinding, ...],
        tables: dict[str, Int[Array, "rows columns"]],
        states: dict[str, StateBlocks],
        rows: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        query_starts: Int[Array, " rows_plus_1"] | None,
        body_lengths: Int[Array, " rows"],
        kv_lens: Int[Array, " rows"],
        implementation: Implementation | None,
    ) -> None:
        """Describes the step's tokens.

        Args:
            planes: the arena's planes; replaced layer by layer.
            tables: block table of each row, per history group.
            states: blocks of each row's state, per state group.
            rows, positions: row and position of each token; row -1 for padding tokens.
            query_starts: where each row's tokens begin; None when every row has exactly one.
            body_lengths: tokens of each row before its checkpoint, see `RecurrentRows`.
            kv_lens: tokens of each row after this step; 0 for a padding row.
            implementation: kernels of attention and recurrence to use; None takes the fastest that serves the call.
        """
        self.planes = planes
        self.expert_ids: dict[int, Int[Array, "tokens top_k"]] = {}
        self._arena = arena
        self._router = router
        self._bindings = bindings
        self._states = states
        self._query_starts = query_starts
        self._recurrent_rows = None if query_starts is None else RecurrentRows(query_starts, body_lengths)
        self._kv_lens = kv_lens
        self._implementation: Implementation | None = implementation
        self._routed = router.route(tables, rows, positions, implementation=implementation)

    def routed(self, expert_ids: Int[Array, "tokens top_k"], layer_id: int) -> Int[Array, "tokens top_k"]:
        """Where the routers send them, which is noted."""
        self.expert_ids[layer_id] = expert_ids
        return expert_ids

    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        """Stores `k` and `v` at their slots and attends `q`; see `models.attention.attend`."""
        binding = self._bindings[layer.layer_id]
        slots = self._routed.write_locations(binding)
        keys = self._store(binding.field("k"), binding, slots, k)
        values = self._store(binding.field("v"), binding, slots, v)
        return self._attend_pages(q, keys, values, binding, layer, sinks)

    def attend_projected(
        self,
        projected: Float[Array, "tokens columns"],
        prologue: AttentionPrologue,
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        """Norms, rotates and stores in one kernel, then attends; see `models.attention.attend_projected`."""
        binding = self._bindings[layer.layer_id]
        fields = binding.field("k"), binding.field("v")
        page_size = self._router.kernel_page_size(binding.group_id)
        keys, values = (self._arena.page_view(self.planes, field_id, page_size) for field_id in fields)
        q, keys, values = attention_prologue(
            projected,
            keys,
            values,
            self._routed.write_locations(binding),
            prologue,
            num_heads=layer.num_heads,
            # Its kernel serves other shapes than those of attention, so who names theirs does not ask for it.
            implementation=None if self._implementation == "mosaic" else self._implementation,
        )
        for field_id, view in zip(fields, (keys, values), strict=True):
            self.planes[self._arena.plane_of(field_id)] = view.plane
        return self._attend_pages(q, keys, values, binding, layer, sinks)

    def _attend_pages(
        self,
        q: Float[Array, "tokens heads dim"],
        keys: PageView,
        values: PageView,
        binding: LayerBinding,
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        page_table = self._routed.page_tables[binding.group_id]
        if self._query_starts is None:
            return decode_attention(
                q,
                keys,
                values,
                page_table,
                self._kv_lens,
                scale=layer.scale,
                sinks=sinks,
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
            sinks=sinks,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
            implementation=self._implementation,
        )

    def attend_latent(
        self,
        q: Float[Array, "tokens heads query_dim"],
        rows: Float[Array, "tokens row_dim"],
        expansion: LatentExpansion,
        layer: LatentAttentionSpec,
    ) -> Float[Array, "tokens heads value_dim"]:
        """Stores `rows` at their slots and attends `q`; see `models.attention.attend_latent`."""
        binding = self._bindings[layer.layer_id]
        slots = self._routed.write_locations(binding)
        cached = self._store(binding.field("latent_kv"), binding, slots, rows[:, None])
        return attend_latent_pages(
            q,
            cached,
            expansion,
            layer,
            self._routed.page_tables[binding.group_id],
            self._query_starts,
            self._kv_lens,
            implementation=self._implementation,
        )

    def convolve(
        self,
        x: Float[Array, "tokens channels"],
        weight: Float[Array, "channels width"],
        bias: Float[Array, " channels"] | None,
        layer: RecurrentSpec,
    ) -> Float[Array, "tokens channels"]:
        """Convolves behind the cached windows; see `models.attention.convolve`."""
        binding = self._bindings[layer.layer_id]
        field_id = binding.field("window")
        windows = self._arena.block_view(self.planes, field_id)
        output, windows = convolve_cached(
            x, weight, bias, windows, self._states[binding.group_id], self._recurrent_rows
        )
        self.planes[self._arena.plane_of(field_id)] = windows.plane
        return output

    def recur(self, inputs: RecurrenceInputs, layer: RecurrentSpec) -> Float[Array, "tokens ..."]:
        """Continues the cached states; see `models.attention.recur`."""
        binding = self._bindings[layer.layer_id]
        field_id = binding.field("state")
        states = self._arena.block_view(self.planes, field_id)
        output, states = recur_cached(
            inputs,
            states,
            self._states[binding.group_id],
            self._recurrent_rows,
            implementation=self._implementation,
        )
        self.planes[self._arena.plane_of(field_id)] = states.plane
        return output

    def _store(
        self,
        field_id: str,
        binding: LayerBinding,
        slots: Int[Array, " tokens"],
        rows: Float[Array, "tokens heads dim"],
    ) -> PageView:
        page_size = self._router.kernel_page_size(binding.group_id)
        view = self._arena.page_view(self.planes, field_id, page_size).write(slots, rows)
        self.planes[self._arena.plane_of(field_id)] = view.plane
        return view
