"""A host tier and an external store below a simulated device, each remembering what lies where.

Copies are as late as the contract allows: a pinned write-back reads its sources only when it completes, so that a
source handed out too early shows up as wrong contents; an unpinned one reads at the start of its plan. Destinations
hold rubbish until then. A load-back's ends must still hold what was copied when it completes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_jax.scheduler import Cache, ExecutionPlan

from .scenario import Group, Step
from .simulated_device import Landing, SimulatedDevice

type Key = tuple[int, str, int]  # group, content hash, offset of the block in its page
type Rows = tuple[object, ...]  # contents of one block; None where nothing was written


@dataclass(frozen=True)
class Transfer:
    group: int
    source: int
    destination: int
    content_hash: str
    offset: int
    from_storage: bool = False

    @property
    def key(self) -> Key:
        return self.group, self.content_hash, self.offset


@dataclass(frozen=True)
class Operation:
    op_id: int
    pinned: bool  # of a write-back
    transfers: tuple[Transfer, ...]


def _operations(batch: Cache.WriteBackOp | Cache.LoadBackOp) -> list[Operation]:
    groups, sources, destinations = batch.group_ids, batch.src_pages, batch.dst_pages
    hashes, offsets = batch.content_hashes, batch.page_offsets
    if isinstance(batch, Cache.WriteBackOp):
        pinned, fetched = batch.source_pinned, [[0] * len(one) for one in groups]
    else:
        pinned, fetched = [False] * len(groups), batch.prefetch_from_storage
    made = []
    for i, op_id in enumerate(batch.op_ids):
        blocks = zip(groups[i], sources[i], destinations[i], hashes[i], offsets[i], fetched[i], strict=True)
        made.append(Operation(op_id, pinned[i], tuple(Transfer(g, s, d, h, o, bool(f)) for g, s, d, h, o, f in blocks)))
    return made


def _cache_of(plan: Step | ExecutionPlan) -> list[Cache.WriteBackOp | Cache.LoadBackOp]:
    return plan.plan.cache if isinstance(plan, Step) else plan.cache


def write_backs(plan: Step | ExecutionPlan) -> list[Operation]:
    return [op for batch in _cache_of(plan) if isinstance(batch, Cache.WriteBackOp) for op in _operations(batch)]


def load_backs(plan: Step | ExecutionPlan) -> list[Operation]:
    return [op for batch in _cache_of(plan) if isinstance(batch, Cache.LoadBackOp) for op in _operations(batch)]


class MissedPrefetch(Exception):
    """The batch was not run: an object was not in the store, or a copy to the device failed."""

    def __init__(self, failed: list[Operation], missing: list[Key]) -> None:
        super().__init__(f"operations {[op.op_id for op in failed]}")
        self.failed, self.missing = failed, missing


@dataclass
class Tiers:
    groups: Sequence[Group]
    prefix_granularity: int
    rows: dict[tuple[int, int, int], Any]  # the device's own: (group, block, row) -> contents
    fails: Callable[[], bool] = lambda: False  # whether the next copy to the device does not come about
    host: dict[tuple[int, int], Rows] = field(default_factory=dict)  # (group, block) -> contents
    store: dict[Key, Rows] = field(default_factory=dict)
    backs_up: bool = False  # a completed write-back leaves an object in the store
    stores: dict[int, tuple[Operation, list[Rows] | None]] = field(default_factory=dict)  # with what was read already
    loads: dict[int, tuple[Operation, list[Rows]]] = field(default_factory=dict)
    loaded: int = 0  # blocks brought back
    fetched: int = 0  # of those, from the store
    evicted: int = 0  # blocks of the host that were overwritten
    meanings: dict[Key, Rows] = field(default_factory=dict)  # what was ever stored by a key

    def contents(self, group: int, block: int) -> Rows:
        rows = 1 if self.groups[group].state else self.groups[group].granularity or self.prefix_granularity
        return tuple(self.rows.get((group, block, row)) for row in range(rows))

    def start_stores(self, step: Step) -> None:
        """What comes before anything else of a plan."""
        started = write_backs(step)
        assert sorted(started, key=lambda op: op.op_id) == started
        self._check_wire(started)
        self._check_wire(load_backs(step))
        for op in started:
            read = None if op.pinned else self._read(op)
            self.stores[op.op_id] = (op, read)
            for transfer in op.transfers:
                self._give_away(transfer.group, transfer.destination)
        stored = [transfer.key for op, _ in self.stores.values() for transfer in op.transfers]
        assert len(set(stored)) == len(stored), "a key is in two stores at once"

    def _give_away(self, group: int, host_block: int) -> None:
        self.evicted += self.host.pop((group, host_block), None) is not None

    def _check_wire(self, ops: list[Operation]) -> None:
        transfers = [transfer for op in ops for transfer in op.transfers]
        assert all(op.transfers for op in ops)
        assert len({(t.group, t.source, t.destination) for t in transfers}) == len(transfers)
        for transfer in transfers:
            group = self.groups[transfer.group]
            assert not group.replayable
            assert (transfer.source - transfer.destination) % group.shards == 0, "a copy changes its shard"

    def _read(self, op: Operation) -> list[Rows]:
        read = [self.contents(transfer.group, transfer.source) for transfer in op.transfers]
        for transfer, rows in zip(op.transfers, read, strict=True):
            assert None not in rows, "a block is stored before it is written"
            assert self.meanings.setdefault(transfer.key, rows) == rows, "a key stands for one content"
        return read

    def load(self, step: Step) -> None:
        """What comes between the plan's zeroing and its forward."""
        failed, missing = [], []
        for op in load_backs(step):
            lost = [t.key for t in op.transfers if t.from_storage and t.key not in self.store]
            missing += lost
            for transfer in op.transfers:
                if transfer.from_storage:
                    self._give_away(transfer.group, transfer.source)
            if lost or self.fails():
                failed.append(op)
                continue
            self.loads[op.op_id] = (op, [self._fetch(transfer) for transfer in op.transfers])
            self.loaded += len(op.transfers)
        if failed:
            raise MissedPrefetch(failed, missing)

    def _fetch(self, transfer: Transfer) -> Rows:
        place = transfer.group, transfer.source
        if transfer.from_storage:
            self.fetched += 1
            self.host[place] = self.store[transfer.key]
        rows = self.host[place]
        # Blocks that the host holds are named by their place alone unless there is an external store.
        assert not transfer.content_hash or self.meanings[transfer.key] == rows, "a key stands for one content"
        for row, content in enumerate(rows):
            self.rows[transfer.group, transfer.destination, row] = content
        return rows

    def complete(self, op_id: int) -> object:
        """Ends a copy that is under way; returns the event that tells of it."""
        if op_id in self.stores:
            op, read = self.stores.pop(op_id)
            for transfer, rows in zip(op.transfers, self._read(op) if read is None else read, strict=True):
                self.host[transfer.group, transfer.destination] = rows
                if self.backs_up:
                    self.store[transfer.key] = rows
            return write_back_done(op_id)
        op, copied = self.loads.pop(op_id)
        for transfer, rows in zip(op.transfers, copied, strict=True):
            assert self.host[transfer.group, transfer.source] == rows, "the source was given away"
            assert self.contents(transfer.group, transfer.destination) == rows, "the destination was given away"
        return Cache.LoadBackDoneEvent(op_id, True)


@dataclass
class TieredDevice(SimulatedDevice):
    def __post_init__(self) -> None:
        self.tiers = Tiers(self.groups, self.prefix_granularity, self.rows)

    def run(self, step: Step) -> list[Landing]:
        self.tiers.start_stores(step)
        self.zero(step)
        self.copy(step)
        self.tiers.load(step)
        return self.forward(step)


def write_back_done(op_id: int) -> Cache.WriteBackDoneEvent:
    event = Cache.WriteBackDoneEvent()
    event.op_id = op_id
    return event
