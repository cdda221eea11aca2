"""Signatures of the C++ scheduler core.

Attributes of plans and batches convert by value: read each of them once. Methods named `*_array` and `*_arrays` return
read-only NumPy views that keep the underlying storage alive.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

class CacheRetention(enum.Enum):
    FullHistory = ...
    SlidingWindow = ...

class CacheGroupFamily(enum.Enum):
    History = ...
    State = ...

class CacheTransferPolicy(enum.Enum):
    Unspecified = ...
    FullSuffix = ...
    LatestSnapshot = ...

class CacheGroupConfig:
    """One cache group as the scheduler sees it.

    Attributes:
        group_id: unique name, the key of the group in plans.
        block_granularity: tokens per block-table slot; divides the prefix granularity.
        total_pages: ids of the group, the null id included: 1 + usable parents x packing.
        cache_blocks_per_lcm_block: packing, children of the group per parent.
        shard_count: cyclic owners of the blocks; divides the packing.
        sliding_window_tokens: tokens, needed with SlidingWindow.
    """

    group_id: str
    block_granularity: int
    total_pages: int
    retention: CacheRetention
    sliding_window_tokens: int | None
    family: CacheGroupFamily
    cache_blocks_per_lcm_block: int
    transfer_policy: CacheTransferPolicy
    shard_count: int
    replayable: bool
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        group_id: str,
        block_granularity: int,
        total_pages: int,
        retention: CacheRetention = ...,
        sliding_window_tokens: int | None = None,
        family: CacheGroupFamily = ...,
        cache_blocks_per_lcm_block: int = 1,
        transfer_policy: CacheTransferPolicy = ...,
        shard_count: int = 1,
        replayable: bool = False,
    ) -> None: ...
    def validate(self) -> None:
        """Raises ValueError for a group that is wrong by itself."""

class SchedulerConfig:
    """The complete configuration of one scheduler.

    Attributes:
        prefix_granularity: tokens at whose multiples prompts are hashed and shared.
        max_scheduled_tokens: token budget of a round, also the longest chunk.
        max_batch_size: rows of a batch, and request-pool slots.
        decode_input_tokens: tokens that a decode step feeds per request.
        overlap_schedule_depth: decode steps planned ahead of the landed one, 0 or 1.
        num_device_pages: device parents, the reserved id 0 included.
        num_host_pages: host parents, the reserved id 0 included.
        cache_groups: read as a copy; assign a whole list to change it.
        prefix_replay_tokens: trailing prompt tokens that are recomputed even after a hit.
        reuse_partial_pages: whether a prompt also takes over what a finished request has left of the prefix page in
            which the two part. It copies that (`ExecutionPlan.pages_to_copy`) and is computed from inside the page on.
            Refused with roles P and D, with `disable_prefix_cache`, and with State or replayable groups.
        dense_block_tables: whether plans carry their rows' block tables. Without, only the resident tables are there to
            be read, and a plan costs what changed rather than what its rows hold.
        plan_past_max_new_tokens: whether a request is decoded on while the result that completes its declared output
            has not landed. A caller that ends requests there saves that step without.
        max_kv_events: stored events that may wait for a drain; later ones are dropped and counted.
        max_overtaken_rounds: rounds in which a waiting request that does not fit may be passed by requests behind it;
            after them nobody behind it, later or less urgent, is admitted before it is. 0 = nobody is ever passed.
        weight_version: prefixes are shared only between requests submitted under the same one; at most 65,536 bytes.
    """

    class Role(enum.Enum):
        P = ...
        D = ...
        Fused = ...

    prefix_granularity: int
    max_scheduled_tokens: int
    max_batch_size: int
    decode_input_tokens: int
    overlap_schedule_depth: int
    role: SchedulerConfig.Role
    num_device_pages: int
    num_host_pages: int
    cache_groups: list[CacheGroupConfig]
    disable_l2_cache: bool
    enable_l3_storage: bool
    enable_kv_cache_events: bool
    enable_mixed_prefill_decode: bool
    disable_prefix_cache: bool
    prefix_replay_tokens: int
    reuse_partial_pages: bool
    max_overtaken_rounds: int
    max_kv_events: int
    dense_block_tables: bool
    plan_past_max_new_tokens: bool
    weight_version: str
    def __init__(self) -> None: ...

class CapacityModel:
    """Block and parent demands of a workload; needs no pool and looks at no page count.

    Raises:
        ValueError: the capacity inputs of the configuration are wrong.
    """

    def __init__(self, config: SchedulerConfig) -> None: ...
    @property
    def num_groups(self) -> int: ...
    def single_request_group_pages(self, token_limit: int) -> list[int]:
        """Most blocks of each group that one request of `token_limit` tokens holds at any time."""
    def concurrent_group_pages(self, max_total_tokens: int, max_context_len: int) -> list[int]:
        """Blocks of each group that let `max_batch_size` requests run side by side."""
    def lcm_blocks_needed_for(self, group_pages: Sequence[int]) -> int:
        """Parents that hold these block counts, one count per group."""
    def max_single_request_tokens(self, usable_lcm_blocks: int) -> int:
        """Longest request, in tokens, that fits these parents on its own."""

class RequestSpec:
    """What a caller submits.

    Attributes:
        tokens: the prompt, of an int32 array or any sequence of ints; read as a copy.
        max_new_tokens: 0 = undeclared.
        priority: the lower, the earlier it is served, and the later it is retracted; first come, first served among
            equals. Nobody who runs is interrupted for a more urgent request, unless the cache runs out.
        cache_salt: prefixes are shared only between requests of the same salt; at most 65,536 bytes.
        fork_of: id of another request with the same tokens and salt, live or earlier in the same submission; empty for
            none. The request waits until that one's prompt is computed and then takes its blocks over, so that only the
            prompt's end is computed again; if they are gone by then, it runs like any other. A request that names one
            cannot be named itself.
        reads_prefix_cache: whether the prompt may skip what is cached; without, which needs role Fused, every token of
            it is fed. What the request computes is cached either way.
    """

    request_id: str
    @property
    def tokens(self) -> list[int]: ...
    @tokens.setter
    def tokens(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None: ...
    max_new_tokens: int
    priority: int
    cache_salt: str
    fork_of: str
    reads_prefix_cache: bool
    def __init__(self) -> None: ...

class ForwardEvent:
    class ExtendResult:
        """One scheduled forward landed.

        `tokens` is empty for an intermediate chunk, the sampled token for a completing one, the accepted tokens for a
        decode step. `round_number` is that of the plan that had the row; with 0 the result belongs to the oldest
        row of its id that is out and can have produced it.

        `forced_tokens` are output behind the one in `tokens` that is certain without being drawn. The request's next
        row then is one of the extends, and feeds all of it, the drawn token included, from `extend_prefix_lens` on; a
        budget, or a boundary of state snapshots, may cut it into several, of which the last one draws. They need role
        Fused, `enable_mixed_prefill_decode`, `decode_input_tokens` 1, and that no later row of the request is out. The
        result may be told before its step has run: the row takes no other.
        """

        request_id: str
        tokens: list[int]
        spec_candidate_ids: list[int]
        round_number: int
        forced_tokens: list[int]
        def __init__(self) -> None: ...

    class Finish:
        request_id: str
        def __init__(self) -> None: ...

    class Abort:
        request_id: str
        def __init__(self) -> None: ...

    class Retract:
        request_id: str
        def __init__(self) -> None: ...

    class UpdateReserveNumTokens:
        request_id: str
        reserve_num_tokens_in_next_schedule_event: int
        def __init__(self) -> None: ...

class Cache:
    """Copies between the device, the host and an external store.

    Operations come in columns: one entry per operation, and in it one per block. `group_ids` are positions in
    `SchedulerConfig.cache_groups`; pages are ids as block tables have them. Unknown and repeated completions are
    ignored.
    """

    class _Operations:
        @property
        def op_ids(self) -> list[int]: ...
        @property
        def group_ids(self) -> list[list[int]]: ...
        @property
        def src_pages(self) -> list[list[int]]: ...
        @property
        def dst_pages(self) -> list[list[int]]: ...
        @property
        def content_hashes(self) -> list[list[str]]:
            """Key of each block with `page_offsets`; an empty text and 0 where a load-back has none."""
        @property
        def page_offsets(self) -> list[list[int]]: ...

    class WriteBackOp(_Operations):
        """From the device to the host.

        An operation without `source_pinned` reads its sources before anything of this or a later plan writes there; one
        with it reads them behind the forwards of all earlier plans, and they stay as they are until it is completed.
        """

        @property
        def source_pinned(self) -> list[bool]: ...

    class LoadBackOp(_Operations):
        """From the host to the device: behind the zeroing of the same plan, ahead of its batch.

        Where `prefetch_from_storage` is 1, the host block is to be filled from the external store first. That must be
        settled before a further plan is asked for: if an object is missing, none of the batch is run, each of its
        requests is retracted, the keys are unregistered, and the operation is completed without success.
        """

        @property
        def prefetch_from_storage(self) -> list[list[int]]: ...

    class WriteBackDoneEvent:
        op_id: int
        def __init__(self) -> None: ...

    class LoadBackDoneEvent:
        op_id: int
        success: bool
        def __init__(self, op_id: int, success: bool) -> None: ...

class PD:
    class BootstrappedEvent:
        def __init__(self, request_id: str) -> None: ...
        @property
        def request_id(self) -> str: ...

    class FailedEvent:
        def __init__(self, request_id: str) -> None: ...
        @property
        def request_id(self) -> str: ...

    class SucceededEvent:
        def __init__(self, request_id: str) -> None: ...
        @property
        def request_id(self) -> str: ...

    class RemotePrefillDoneEvent:
        bootstrap_token: int
        def __init__(self, request_id: str, bootstrap_token: int) -> None: ...
        @property
        def request_id(self) -> str: ...

class KVEvent:
    """Prefixes that came into the device cache, or left it.

    With a full-history group in the configuration, a page is there when all such groups have it, whatever the windows
    and states hold; without, when all groups do.
    """

    class BlockStored:
        """One page. `cache_salt` is that of the requests that share it, on a prompt's first page only."""

        @property
        def kind(self) -> str: ...
        @property
        def block_hashes(self) -> list[int]: ...
        @property
        def parent_block_hash(self) -> int | None: ...
        @property
        def token_ids(self) -> list[int]: ...
        @property
        def block_size(self) -> int: ...
        @property
        def cache_salt(self) -> str: ...

    class BlockRemoved:
        @property
        def kind(self) -> str: ...
        @property
        def block_hashes(self) -> list[int]: ...

type _Event = (
    ForwardEvent.ExtendResult
    | ForwardEvent.Finish
    | ForwardEvent.Abort
    | ForwardEvent.Retract
    | ForwardEvent.UpdateReserveNumTokens
    | Cache.WriteBackDoneEvent
    | Cache.LoadBackDoneEvent
    | PD.BootstrappedEvent
    | PD.FailedEvent
    | PD.SucceededEvent
    | PD.RemotePrefillDoneEvent
)

class ExecutionEvent:
    def __init__(self) -> None: ...
    def add_event(self, event: _Event) -> ExecutionEvent:
        """Appends a copy of the event; returns this object."""

class Forward:
    class Batch:
        """One model step. Prefill rows come first, then decode rows.

        A prefill row finishes its prompt iff extend_prefix_lens + input_lengths == prefill_lengths. Block tables have
        one row per request and one column per slot: 0 is a hole, -1 stands right of a shorter row.
        """

        @property
        def request_ids(self) -> list[str]: ...
        @property
        def request_pool_indices(self) -> list[int]: ...
        @property
        def input_lengths(self) -> list[int]: ...
        @property
        def prefill_lengths(self) -> list[int]: ...
        @property
        def input_ids(self) -> list[int]: ...
        @property
        def shifted_input_ids(self) -> list[int]: ...
        @property
        def extend_prefix_lens(self) -> list[int]: ...
        @property
        def extend_replay_lens(self) -> list[int]: ...
        @property
        def decode_input_ids(self) -> list[int]: ...
        @property
        def spec_candidate_ids(self) -> list[list[int]]: ...
        @property
        def block_tables(self) -> dict[str, list[list[int]]]: ...
        def block_tables_arrays(self) -> dict[str, npt.NDArray[np.int32]]: ...
        def num_extends(self) -> int: ...
        def request_pool_indices_array(self) -> npt.NDArray[np.int32]: ...
        def input_lengths_array(self) -> npt.NDArray[np.int32]: ...
        def prefill_lengths_array(self) -> npt.NDArray[np.int32]: ...
        def input_ids_array(self) -> npt.NDArray[np.int32]: ...
        def shifted_input_ids_array(self) -> npt.NDArray[np.int32]: ...
        def extend_prefix_lens_array(self) -> npt.NDArray[np.int32]: ...
        def extend_replay_lens_array(self) -> npt.NDArray[np.int32]: ...
        def decode_input_ids_array(self) -> npt.NDArray[np.int32]: ...
        def arrays(self) -> dict[str, npt.NDArray[np.int32]]:
            """Every list of numbers by its name: int32 [entries], read-only views."""

class ExecutionPlan:
    """Everything one round asks of the executor; `forward` holds exactly one batch, possibly without rows.

    In this order: write-backs that are not pinned, the zeroing of `pages_to_zero`, `pages_to_copy`, load-backs, the
    batch. A copy (source, destination) takes the whole contents of a block to another one of its group; no block is
    both a source and a destination.
    """

    @property
    def round_number(self) -> int:
        """Counts plans from 1; names this plan's rows when their results come in."""
    @property
    def forward(self) -> list[Forward.Batch]: ...
    @property
    def cache(self) -> list[Cache.WriteBackOp | Cache.LoadBackOp]:
        """At most one of each, the write-backs first."""
    @property
    def remote_decode(self) -> Forward.Batch | None: ...
    @property
    def remote_prefill(self) -> Forward.Batch | None: ...
    @property
    def pages_to_zero(self) -> dict[str, list[int]]: ...
    def pages_to_zero_arrays(self) -> dict[str, npt.NDArray[np.int32]]: ...
    @property
    def pages_to_copy(self) -> dict[str, list[tuple[int, int]]]: ...
    def pages_to_copy_arrays(self) -> dict[str, npt.NDArray[np.int32]]: ...
    def table_changes(self) -> dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """What changed in the resident tables since the plan before this one, for each group in which something did.

        Spans, int32 [spans, 3] of request-pool slot, first column and length, and their entries one after the other,
        int32 [entries]. Read-only views.
        """

class Scheduler:
    """Decides, round by round, which requests run and where their cache lives.

    Deterministic. A refused call changes nothing. Calls on one instance must not overlap (RuntimeError).

    Raises:
        ValueError: the configuration is wrong, or asks for what is not supported yet.
    """

    def __init__(self, config: SchedulerConfig) -> None: ...
    def submit_requests(self, request_specs: Sequence[RequestSpec]) -> None:
        """All or nothing; ValueError names the entry, the request and the limit.

        An id may be used again once its request has ended. Results that are then still out are dropped when they come
        in: an ExtendResult that names no round belongs to the oldest row of its id that has none yet, whichever request
        that was planned for.
        """
    def set_weight_version(self, weight_version: str) -> None:
        """Later requests share prefixes only with those of the same version; running ones keep theirs."""
    def next_execution_plan(self) -> ExecutionPlan:
        """Plans one round; releases the interpreter lock meanwhile."""
    def advance(self, event: ExecutionEvent) -> None:
        """All or nothing; the text of an error ends with the number of the bad event.

        Raises:
            RuntimeError: an event is illegal in its request's state, or its row is not out.
            ValueError: an event has a wrong value, such as more tokens than its row can have produced.
        """
    def advance_rows(
        self,
        slots: npt.NDArray[np.int32],
        token_counts: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        round_number: int = 0,
    ) -> None:
        """Lands results of planned rows: an ExtendResult a row, in order, without an object a row.

        All or nothing; an error names the bad entry. With a round these are all results of that plan: a row whose
        request has ended may be left out or is dropped. Without one such a row must be left out, for its slot may be
        another request's by now.

        Args:
            slots: int32 [n], the rows' request-pool indices, each at most once.
            token_counts: int32 [n], tokens of each row; 0 for a chunk that does not complete its prompt.
            tokens: int32 [sum of token_counts], the rows' tokens one after the other.
            round_number: of the plan that had the rows; 0 = not said.

        Raises:
            ValueError: arrays that do not fit each other, a slot twice, more tokens than a row can have produced, a
                round that has not been planned.
            RuntimeError: no request in the slot, no result out, a token for an unfinished prompt.
            TypeError: not contiguous int32 arrays.
        """
    def finish_rows(self, slots: npt.NDArray[np.int32]) -> None:
        """A Finish for the request in each slot, in order; all or nothing, with the errors of `advance_rows`."""
    def block_table_views(self) -> dict[str, npt.NDArray[np.int32]]:
        """Per group the tables of all resident requests: int32 [request-pool slots + 1, columns], -1 past a row's end.

        Read-only views that every plan keeps up to date in place. Ask again after each plan: a grid that had to grow
        is another array.
        """
    def drain_kv_events(self) -> list[KVEvent.BlockStored | KVEvent.BlockRemoved]:
        """The net change since the last drain: removed boundaries deepest first, then stored ones shallowest first."""
    def dropped_kv_events(self) -> int:
        """Stored events that were never reported because `max_kv_events` waited already, since the start."""
    def bootstrapping_size(self) -> int: ...
    def waiting_size(self) -> int: ...
    def prefilling_size(self) -> int: ...
    def remote_prefilling_size(self) -> int: ...
    def decoding_size(self) -> int: ...
    def pd_transfer_size(self) -> int: ...
    def pd_transfer_pinned(self, request_id: str) -> bool: ...
    def num_retractions(self) -> int:
        """Times that a resident request gave up its cache, since the start."""
    def num_checkpoint_lost_tokens(self) -> int:
        """Prompt tokens, since the start, that the groups of whole history held when a prompt was admitted but that
        it computed again, since no state snapshot stood at their end. 0 without a state group."""
    def empty_lcm_blocks(self) -> int: ...
    def active_lcm_blocks(self) -> int: ...
    def available_lcm_blocks(self) -> int:
        """Empty and evictable parents. O(1), as are the other two counts."""
    def lcm_block_uses(self) -> npt.NDArray[np.int32]:
        """What each parent is taken for, int32 [usable parents], a copy.

        0 for an empty parent; g + 1 for one with a block of group g that a request holds; -(g + 1) for one whose blocks
        of group g are only cached or being copied. Groups count as in `SchedulerConfig.cache_groups`. A scan.
        """
    def host_cached_blocks(self) -> int:
        """Host blocks that a prompt can hit."""
    def host_pinned_blocks(self) -> int:
        """Occupied host blocks that no eviction can take: a copy is under way."""
    def host_empty_lcm_blocks(self) -> int: ...
    def num_dropped_stores(self) -> int:
        """Blocks that were not copied to the host for want of room there, since the start."""
    def request_token_size(self, request_id: str) -> int:
        """Prompt and landed output in tokens, -1 for an unknown id."""
    def max_single_request_tokens(self) -> int: ...
    def cache_group_total_pages(self, group_id: str) -> int: ...
    def cache_group_available_pages(self, group_id: str) -> int: ...
    def cache_group_hit_tokens(self, group_id: str) -> int:
        """Tokens that prompts took over from the group's cached blocks when they were admitted, since the start.

        Of a group of whole history that is the whole hit, of a window its end, of states one block, of a replayable
        group nothing. Prompts that start again after a retraction count again; forks look nothing up.
        """
    def clear_l1_cache(self) -> bool:
        """Drops what the device caches, and all storage keys; False while a request holds any or a copy is out."""
    def clear_cache(self) -> bool:
        """The same for device and host."""
    def can_clear_cache(self) -> bool: ...
    def prefix_hashes_for_tokens(self, tokens: Sequence[int], cache_salt: str = "") -> list[str]:
        """Of the pages that a request of this salt, submitted now, would look up; 64 hexadecimal digits each."""
    def waiting_prefix_hashes(self) -> list[str]:
        """Pages that the next round may look up, each once: those to ask an external store about just before it."""
    def expand_prefix_keys(self, content_hashes: Sequence[str]) -> tuple[list[str], list[str], list[int]]: ...
    def register_storage_keys(
        self, group_ids: Sequence[str], content_hashes: Sequence[str], page_offsets: Sequence[int]
    ) -> None:
        """Blocks that the external store holds count as hits from now on. All or nothing.

        When there are more than the host has room for, the first pages of the list are kept.

        Raises:
            IndexError: an unknown group.
            ValueError: columns of different lengths, a hash that is not 64 lowercase hexadecimal digits, an offset
                outside the page.
        """
    def unregister_storage_keys(
        self, group_ids: Sequence[str], content_hashes: Sequence[str], page_offsets: Sequence[int]
    ) -> None:
        """Blocks that turned out to be missing; the errors are those of `register_storage_keys`."""
