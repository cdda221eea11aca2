"""The random workload over a scheduler with a host tier and an external store, both of which misbehave."""

from collections.abc import Sequence

from tokenspeed_jax.scheduler import Cache, ForwardEvent

from .scenario import Group, Step, named
from .simulated_tiers import MissedPrefetch, TieredDevice, write_back_done, write_backs
from .workload import P, Workload


class TierWorkload(Workload):
    """Copies complete late and in any order; objects get lost; keys are believed that were never stored."""

    def __init__(
        self, groups: Sequence[Group], usable: int, host: int, seed: int, *, storage: bool = False, **fields: object
    ) -> None:
        fields |= {"num_host_pages": host + 1, "enable_l3_storage": storage}
        super().__init__(groups, usable, seed, **fields)
        self.device = TieredDevice(groups, P, self.width, lambda: self.random.randint(1, self.width))
        self.tiers = self.device.tiers
        self.tiers.fails = lambda: self.random.random() < self.failure_rate
        self.tiers.backs_up = storage
        self.storage = storage
        self.patience = 6  # rounds that a copy may take
        self.failure_rate = 0.0
        self.due: dict[int, int] = {}  # operation -> rounds until it completes
        self.missed = 0  # batches that were not run

    def plan(self) -> Step:
        self.complete_copies()
        if self.random.random() < 0.1:
            self.clear()
        if self.storage:
            self.ask_the_store()
        retractions = self.scheduler.num_retractions()
        step = super().plan()
        gave_way = self.scheduler.num_retractions() > retractions
        assert gave_way or all(op.pinned for op in write_backs(step)), "only a retraction stores without holding"
        return step

    def clear(self) -> None:
        """Mostly refused, since somebody runs or a copy is out. What the host has must come back afterwards."""
        both = self.random.random() < 0.1
        for scheduler in self.schedulers:
            clearable, cached = scheduler.can_clear_cache(), scheduler.host_cached_blocks()
            cleared = scheduler.clear_cache() if both else scheduler.clear_l1_cache()
            assert cleared or not clearable
            assert scheduler.host_cached_blocks() == (0 if cleared and both else cached)

    def complete_copies(self) -> None:
        for op_id in [*self.tiers.stores, *self.tiers.loads]:
            self.due.setdefault(op_id, self.random.randint(0, self.patience))
        done = [op_id for op_id, rounds in self.due.items() if rounds == 0]
        self.random.shuffle(done)
        for op_id in done:
            del self.due[op_id]
            self.advance(self.tiers.complete(op_id))
            # Repeated, unknown and untimely completions.
            self.advance(write_back_done(op_id), Cache.LoadBackDoneEvent(op_id, self.random.random() < 0.5))
            self.advance(write_back_done(op_id + 10_000), Cache.LoadBackDoneEvent(op_id + 10_000, False))
        self.due = {op_id: rounds - 1 for op_id, rounds in self.due.items()}

    def ask_the_store(self) -> None:
        if self.tiers.store and self.random.random() < 0.3:
            del self.tiers.store[self.random.choice(sorted(self.tiers.store))]
        hashes, twin = (scheduler.waiting_prefix_hashes() for scheduler in self.schedulers)
        assert hashes == twin
        present: list[tuple[str, str, int]] = []
        absent: list[tuple[str, str, int]] = []
        for group_id, content_hash, offset in zip(*self.scheduler.expand_prefix_keys(hashes), strict=True):
            known = (int(group_id[1:]), content_hash, offset) in self.tiers.store
            believed = known or self.random.random() < 0.02
            (present if believed else absent).append((group_id, content_hash, offset))
        self.tell(present, absent if self.random.random() < 0.5 else [])

    def tell(self, present: Sequence[tuple[str, str, int]], absent: Sequence[tuple[str, str, int]]) -> None:
        for scheduler in self.schedulers:
            for keys, method in (
                (present, scheduler.register_storage_keys),
                (absent, scheduler.unregister_storage_keys),
            ):
                if keys:
                    method([key[0] for key in keys], [key[1] for key in keys], [key[2] for key in keys])

    def execute(self, step: Step) -> None:
        try:
            super().execute(step)
        except MissedPrefetch as miss:
            self.missed += 1
            while self.pending:
                self.land()
            self.tell([], [(f"g{group}", content_hash, offset) for group, content_hash, offset in miss.missing])
            for request_id in step.ids:
                if request_id not in self.live:
                    continue
                self.advance(named(ForwardEvent.Retract, request_id))
                request = self.live[request_id]
                request.tables, request.slot, request.in_flight, request.reserved = None, None, 0, False
            self.advance(*(Cache.LoadBackDoneEvent(op.op_id, False) for op in miss.failed))

    def settle(self) -> None:
        self.patience = 0
        for _ in range(3):  # a finish may still have a store to start, which the next plan tells of
            assert not self.plan().ids
            while self.due:
                self.complete_copies()
        self.complete_copies()
        assert not self.tiers.stores
        assert not self.tiers.loads
        for scheduler in self.schedulers:
            assert scheduler.host_pinned_blocks() == 0
