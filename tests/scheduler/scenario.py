"""A scheduler under test, driven in the words of the specification: submit, plan, land, finish, life."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_jax.scheduler import (
    CacheGroupConfig,
    CacheGroupFamily,
    CacheRetention,
    CacheTransferPolicy,
    ExecutionEvent,
    ExecutionPlan,
    Forward,
    ForwardEvent,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
)


@dataclass(frozen=True)
class Group:
    """One cache group: `window` None is a full-history group; `granularity` None takes the prefix granularity."""

    window: int | None = None
    granularity: int | None = None
    packing: int = 1
    shards: int = 1
    state: bool = False  # blocks are snapshots of everything before them
    replayable: bool = False  # rows come back by feeding a window again


FULL = Group()
STATE = Group(state=True)


def swa(window: int, granularity: int | None = None, packing: int = 1) -> Group:
    return Group(window, granularity, packing)


def replayable(window: int, granularity: int | None = None, packing: int = 1) -> Group:
    return Group(window, granularity, packing, replayable=True)


def make_config(
    groups: Sequence[Group], usable: int, *, P: int = 2, budget: int = 64, **fields: object
) -> SchedulerConfig:
    """Groups are named g0, g1, ...; `usable` parents; any further field of SchedulerConfig by name."""
    config = SchedulerConfig()
    config.prefix_granularity = P
    config.max_scheduled_tokens = budget
    config.max_batch_size = 8
    config.num_device_pages = usable + 1
    config.cache_groups = [
        CacheGroupConfig(
            f"g{index}",
            group.granularity or P,
            1 + usable * group.packing,
            retention=CacheRetention.FullHistory if group.window is None else CacheRetention.SlidingWindow,
            sliding_window_tokens=group.window,
            family=CacheGroupFamily.State if group.state else CacheGroupFamily.History,
            cache_blocks_per_lcm_block=group.packing,
            shard_count=group.shards,
            replayable=group.replayable,
            transfer_policy=CacheTransferPolicy.LatestSnapshot if group.state else CacheTransferPolicy.FullSuffix,
        )
        for index, group in enumerate(groups)
    ]
    for name, value in fields.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


def spec(request_id: str, tokens: Sequence[int], max_new: int = 0, **fields: object) -> RequestSpec:
    """Any further field of RequestSpec by name."""
    made = RequestSpec()
    made.request_id, made.tokens, made.max_new_tokens = request_id, list(tokens), max_new
    for name, value in fields.items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def extend_result(
    request_id: str, tokens: Sequence[int] = (), candidates: Sequence[int] = ()
) -> ForwardEvent.ExtendResult:
    event = ForwardEvent.ExtendResult()
    event.request_id, event.tokens, event.spec_candidate_ids = request_id, list(tokens), list(candidates)
    return event


def named(kind: type, request_id: str) -> ForwardEvent.Finish:
    event = kind()
    event.request_id = request_id
    return event


def reserve(request_id: str, tokens: int) -> ForwardEvent.UpdateReserveNumTokens:
    event = ForwardEvent.UpdateReserveNumTokens()
    event.request_id, event.reserve_num_tokens_in_next_schedule_event = request_id, tokens
    return event


class Step:
    """A plan's batch, or another of its batches, read once."""

    def __init__(self, plan: ExecutionPlan, batch: Forward.Batch | None = None) -> None:
        if batch is None:
            (batch,) = plan.forward
        self.plan = plan
        self.batch: Forward.Batch = batch
        self.ids = batch.request_ids
        self.inputs = batch.input_lengths
        self.prefixes = batch.extend_prefix_lens
        self.replays = batch.extend_replay_lens
        self.tables = batch.block_tables
        self.zeroed = plan.pages_to_zero
        self.copied = plan.pages_to_copy

    @property
    def hand_off(self) -> "Step | None":
        """Role P: what goes to the peer."""
        return None if self.plan.remote_decode is None else Step(self.plan, self.plan.remote_decode)

    @property
    def landing(self) -> "Step | None":
        """Role D: what the peer is to compute."""
        return None if self.plan.remote_prefill is None else Step(self.plan, self.plan.remote_prefill)

    def row(self, request_id: str, group: int = 0) -> list[int]:
        """The request's table without the padding."""
        return [block for block in self.tables[f"g{group}"][self.ids.index(request_id)] if block != -1]


class Scenario:
    def __init__(self, groups: Sequence[Group], usable: int, **fields: object) -> None:
        self.scheduler = Scheduler(make_config(groups, usable, **fields))  # pyright: ignore[reportArgumentType]
        self.usable = usable
        self._fresh = 1_000_000

    def fresh(self, count: int) -> list[int]:
        """Tokens that no other prompt has."""
        self._fresh += count
        return list(range(self._fresh - count, self._fresh))

    def submit(self, request_id: str, prompt: int | Sequence[int], max_new: int = 0, **fields: object) -> None:
        """`prompt`: tokens, or how many distinct ones."""
        tokens = self.fresh(prompt) if isinstance(prompt, int) else prompt
        self.scheduler.submit_requests([spec(request_id, tokens, max_new, **fields)])

    def plan(self) -> Step:
        return Step(self.scheduler.next_execution_plan())

    def advance(self, *events: object) -> None:
        batch = ExecutionEvent()
        for event in events:
            batch.add_event(event)  # type: ignore[arg-type]
        self.scheduler.advance(batch)

    def land(self, request_id: str, *tokens: int) -> None:
        self.advance(extend_result(request_id, tokens))

    def finish(self, request_id: str) -> None:
        self.advance(named(ForwardEvent.Finish, request_id))

    def abort(self, request_id: str) -> None:
        self.advance(named(ForwardEvent.Abort, request_id))

    def reserve(self, request_id: str, tokens: int) -> None:
        self.advance(reserve(request_id, tokens))

    def prefill(self, request_id: str, prompt: int | Sequence[int], max_new: int = 0) -> Step:
        """Submits, plans once and lands a token; the prompt must fit one chunk and nobody may be in its way."""
        self.submit(request_id, prompt, max_new)
        step = self.plan()
        assert request_id in step.ids
        self.land(request_id, 7)
        return step

    def life(self, request_id: str, prompt: int | Sequence[int]) -> Step:
        """Prefill, land, decode, land, finish, plan. Returns the first step."""
        step = self.prefill(request_id, prompt)
        assert self.plan().ids == [request_id]
        self.land(request_id, 8)
        self.finish(request_id)
        self.plan()
        return step

    @property
    def available(self) -> int:
        return self.scheduler.available_lcm_blocks()


def real(row: Sequence[int]) -> int:
    """Slots of a table row that hold a block."""
    return sum(block > 0 for block in row)
