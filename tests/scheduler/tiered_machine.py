"""The machine over a host tier and an external store, whose copies are late, in any order, and may fail.

The model follows the contents of every block from device to host to store and back. A copy that fails leaves rubbish
behind, and the batch that needed it is not run: what becomes of its requests, and when the scheduler is told, is again
for hypothesis to choose.
"""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tokenspeed_jax.scheduler import Cache, ForwardEvent

from .scenario import Group, Step, named
from .scheduler_machine import GROUP_SETS, MET, PROMPTS, WHICH, P, SchedulerMachine, chosen
from .simulated_tiers import Key, MissedPrefetch, Operation, Tiers, load_backs, write_back_done, write_backs
from .twins import advance

FAILURES = st.sampled_from([0, 0, 0, 1, 2, 3])  # which of the next copies to the device do not come about, by bit


class TieredMachine(SchedulerMachine):
    @initialize(
        groups=st.sampled_from(GROUP_SETS),
        usable=st.integers(9, 16),
        host=st.integers(1, 24),
        storage=st.booleans(),
        budget=st.integers(14, 30),
        width=st.integers(1, 3),
        overlap=st.integers(0, 1),
        mixed=st.booleans(),
        batch=st.integers(1, 5),
        caches=st.sampled_from([True, True, True, False]),
    )
    def build(  # type: ignore[override]
        self,
        groups: tuple[Group, ...],
        usable: int,
        host: int,
        storage: bool,
        budget: int,
        width: int,
        overlap: int,
        mixed: bool,
        batch: int,
        caches: bool,
    ) -> None:
        self.storage = storage and all(group.shards == 1 for group in groups)
        self.start(
            groups,
            usable,
            budget=budget,
            decode_input_tokens=width,
            overlap_schedule_depth=overlap,
            enable_mixed_prefill_decode=mixed,
            max_batch_size=batch,
            disable_prefix_cache=not caches,
            num_host_pages=host + 1,
            enable_l3_storage=self.storage,
        )
        self.failures, self.aborts = 0, 0
        self.tiers = Tiers(groups, P, self.memory, self.next_copy_fails, backs_up=self.storage)
        self.failed: list[Operation] = []  # not told to the scheduler yet
        self.missing: list[Key] = []
        self.failed_once: set[Key] = set()  # keys of fetches that failed
        self.waiting_for: dict[int, set[str]] = {}  # load -> who needs it
        self.done: list[int] = []

    def next_copy_fails(self) -> bool:
        self.failures, fails = self.failures // 2, self.failures % 2
        return bool(fails)

    # Copies ---------------------------------------------------------------------------------------------------------

    def may_plan(self) -> bool:
        # A failure must be told before a further plan is asked for.
        return super().may_plan() and not self.failed

    def make_ready(self, step: Step) -> bool:
        MET["snapshots"] += sum(not op.pinned for op in write_backs(step))
        self.tiers.start_stores(step)
        self.zero(step)
        loads = load_backs(step)
        try:
            self.tiers.load(step)
        except MissedPrefetch as miss:
            self.failed, self.missing = miss.failed, miss.missing
        for op in loads:
            self.note_load(step, op)
        MET["host evictions"] += self.tiers.evicted
        self.tiers.evicted = 0
        return not self.failed

    def note_load(self, step: Step, op: Operation) -> None:
        destinations = {(transfer.group, transfer.destination) for transfer in op.transfers}
        waiting = {
            request_id
            for request_id in step.ids
            for group in range(len(self.groups))
            if destinations & {(group, block) for block in step.row(request_id, group)}
        }
        assert waiting, "what is loaded is for somebody"  # others may share it at once
        keys = {transfer.key for transfer in op.transfers if transfer.content_hash}
        if op in self.failed:
            MET["missing objects" if self.missing else "failed copies"] += 1
            self.failed_once |= keys
            self.spoil(op)
            return
        MET["retries"] += bool(keys & self.failed_once)
        self.waiting_for[op.op_id] = waiting
        extends = [row for row, name in enumerate(step.ids[: step.batch.num_extends()]) if name in waiting]
        # What was generated has become a part of the prompt.
        MET["recoveries"] += any(step.batch.prefill_lengths[row] > self.live[step.ids[row]].prompt for row in extends)
        MET["store hits"] += any(transfer.from_storage for transfer in op.transfers)
        MET["host hits"] += any(not transfer.from_storage for transfer in op.transfers)

    def spoil(self, op: Operation) -> None:
        for transfer in op.transfers:
            for row in range(self.granularity(transfer.group)):
                self.memory[transfer.group, transfer.destination, row] = ("rubbish",)

    @property
    def under_way(self) -> list[int]:
        return sorted([*self.tiers.stores, *self.tiers.loads])

    def complete(self, op_id: int) -> None:
        advance(self.tiers.complete(op_id))(self.scheduler)
        self.waiting_for.pop(op_id, None)
        self.done.append(op_id)

    @precondition(lambda self: self.under_way)
    @rule(which=WHICH)
    def complete_one(self, which: int) -> None:
        self.complete(chosen(which, self.under_way))

    @precondition(lambda self: self.done)
    @rule(which=WHICH, success=st.booleans(), unknown=st.integers(0, 1))
    def complete_again(self, which: int, success: bool, unknown: int) -> None:
        op_id = chosen(which, self.done) + unknown * 1_000_000
        before = self.state()
        advance(write_back_done(op_id), Cache.LoadBackDoneEvent(op_id, success))(self.scheduler)
        assert self.state() == before

    # Failures -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.failed)
    @rule(order=st.permutations(["keys", "requests", "operations"]), aborts=st.integers(0, 2))
    def tell_of_failure(self, order: list[str], aborts: int) -> None:
        """Some of its requests may be given up before."""
        for request_id in self.idle_in_failure()[:aborts]:
            advance(named(ForwardEvent.Abort, request_id))(self.scheduler)
            self.forget(request_id)
        for request_id in [name for name, request in self.live.items() if not all(row.ran for row in request.out)]:
            self.land_out(request_id)
        for part in order:
            if part == "keys":
                self.tell([], [(f"g{group}", content_hash, offset) for group, content_hash, offset in self.missing])
            elif part == "requests":
                for request_id in self.idle_in_failure():
                    self.start_again(request_id)
            else:
                advance(*(Cache.LoadBackDoneEvent(op.op_id, False) for op in self.failed))(self.scheduler)
        self.done += [op.op_id for op in self.failed]
        self.failed, self.missing = [], []

    def idle_in_failure(self) -> list[str]:
        """Whose next result will not come."""
        return [name for name, request in self.live.items() if request.out and not request.landable]

    def forget(self, request_id: str) -> None:
        MET["ended before its failure is told"] += not all(row.ran for row in self.live[request_id].out)
        MET["ended during its load"] += any(request_id in names for names in self.waiting_for.values())
        for names in self.waiting_for.values():
            names.discard(request_id)
        super().forget(request_id)

    # The store ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.storage)
    @rule(believed=st.integers(0, 7), forgets=st.booleans())
    def ask_the_store(self, believed: int, forgets: bool) -> None:
        """As before a plan; some of what is said to be there, by bit, is not."""
        present: list[tuple[str, str, int]] = []
        absent: list[tuple[str, str, int]] = []
        keys = self.scheduler.expand_prefix_keys(self.scheduler.waiting_prefix_hashes())
        for number, (group_id, content_hash, offset) in enumerate(zip(*keys, strict=True)):
            known = (int(group_id[1:]), content_hash, offset) in self.tiers.store
            (present if known or believed >> number & 1 else absent).append((group_id, content_hash, offset))
        self.tell(present, absent if forgets else [])

    @precondition(lambda self: self.storage)
    @rule(tokens=PROMPTS, salt=st.sampled_from(["", "salt"]))
    def announce(self, tokens: list[int], salt: str) -> None:
        """Keys that nobody has asked for, of objects that may not exist."""
        hashes = self.scheduler.prefix_hashes_for_tokens(tokens, salt)
        self.tell(list(zip(*self.scheduler.expand_prefix_keys(hashes), strict=True)), [])

    def tell(self, present: list[tuple[str, str, int]], absent: list[tuple[str, str, int]]) -> None:
        for keys, method in (
            (present, self.scheduler.register_storage_keys),
            (absent, self.scheduler.unregister_storage_keys),
        ):
            if keys:
                method([key[0] for key in keys], [key[1] for key in keys], [key[2] for key in keys])

    @precondition(lambda self: self.tiers.store)
    @rule(which=WHICH)
    def lose_an_object(self, which: int) -> None:
        del self.tiers.store[chosen(which, self.tiers.store)]

    # Between rounds -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.may_plan())
    @rule(accepted=st.integers(1, 3), failures=FAILURES)
    def plan(self, accepted: int, failures: int) -> None:  # type: ignore[override]
        self.failures = failures
        self.execute(accepted)

    @precondition(lambda self: self.live)
    @rule(
        rounds=st.integers(1, 12),
        accepted=st.integers(1, 3),
        copies=st.integers(0, 3),
        failures=FAILURES,
        aborts=st.integers(0, 1),
    )
    def run(  # type: ignore[override]
        self, rounds: int, accepted: int, copies: int, failures: int, aborts: int
    ) -> None:
        self.failures, self.aborts = failures, aborts
        for _ in range(rounds):
            self.land_all()
            for op_id in self.under_way[:copies]:
                self.complete(op_id)
            self.execute(accepted)

    @rule(
        clears=st.sampled_from(["device", "device", "both"]),
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        new=st.integers(2, 18),
        failures=FAILURES,
        lost=st.integers(0, 2),
    )
    def come_back(self, clears: str, prompts: list[list[int]], new: int, failures: int, lost: int) -> None:
        """Everybody finishes, after a crowd; who comes next finds no device cache, and less in the store."""
        for tokens in prompts:
            self.submit_one([0] * 8 + tokens, new, declared=False, salt="", priority=0)
        for number in range(100):
            if not self.live:
                break
            self.settle()
            self.failures = failures if number < 5 else 0
            self.execute(accepted=1)
        self.settle()
        (self.clear if clears == "both" else self.clear_device)()
        for tokens in prompts:
            self.submit_one([0] * 8 + tokens, 6, declared=False, salt="", priority=0)
        if self.storage:
            self.ask_the_store(believed=0, forgets=False)
            for key in sorted(self.tiers.store)[:lost]:
                del self.tiers.store[key]

    @rule()
    def clear_device(self) -> None:
        clearable, cached = self.scheduler.can_clear_cache(), self.scheduler.host_cached_blocks()
        cleared = self.scheduler.clear_l1_cache()
        assert cleared or not clearable
        assert self.scheduler.host_cached_blocks() == cached
        MET["clears above a host"] += cleared and cached > 0
        if cleared:
            super().note_clear()

    def note_clear(self) -> None:
        super().note_clear()
        assert self.scheduler.host_cached_blocks() == 0
        self.tiers.host.clear()

    def land_all(self) -> None:
        if self.failed:
            self.tell_of_failure(["keys", "requests", "operations"], self.aborts)
        super().land_all()

    def settle(self) -> None:
        self.failures, self.aborts = 0, 0
        super().settle()
        for op_id in self.under_way:
            self.complete(op_id)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            assert self.scheduler.host_pinned_blocks() == 0
