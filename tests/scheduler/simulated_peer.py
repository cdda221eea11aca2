"""A prefill and a decode worker wired together: what the one hands off lands on the other.

The transfer copies what the transfer policies name: all blocks behind the receiver's hit of a closed group, the blocks
of the last W - 1 positions of a window, the snapshot at the end of a state. It may take its time, come twice, fail, or
be given up on either side; both devices then check every read of what is computed from it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenspeed_jax.scheduler import PD, ForwardEvent, SchedulerConfig

from .scenario import Group, Step, named
from .simulated_device import DeviceRequest
from .simulated_worker import Worker

Role = SchedulerConfig.Role


@dataclass
class Prompt:
    """A request on its way through both workers."""

    tokens: list[int]
    stop_after: int  # generated tokens
    source: list[list[int]] | None = None  # the prefill worker's tables, once it has handed off
    target: list[list[int]] | None = None  # the decode worker's tables, once it waits for a landing
    hit: int = 0
    landed: bool = False
    recovers: bool = False  # it was told to start again before its landing
    generated: int = 0


@dataclass
class Pair:
    groups: Sequence[Group]
    usable_by_role: tuple[int, int]
    seed: int
    fields: dict[str, object] = field(default_factory=dict)
    disturbed: bool = True
    priorities: Sequence[int] = (0,)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)  # by request, what landed beside its first token
    submitted: int = 0
    timeouts: int = 0
    landings: int = 0
    idle: int = 0  # rounds on end
    progress: int = 0  # tokens, hand-offs, landings
    barren: int = 0  # rounds on end without any

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.p, self.d = (
            Worker(role, self.groups, usable, self.random, self.fields)
            for role, usable in zip((Role.P, Role.D), self.usable_by_role, strict=True)
        )
        self.depth = self.d.config.overlap_schedule_depth

    def submit(self, length: int | None = None, new: int | None = None) -> bool:
        """A random request, or one of the given size; False when it is over a pool's limit."""
        length = self.random.randint(1, 24) if length is None else length
        new = self.random.randint(1, 12) if new is None else new
        room = new + self.d.width * (1 + self.depth)
        if length + room > self.d.scheduler.max_single_request_tokens():
            return False
        if length > self.p.scheduler.max_single_request_tokens():
            return False
        tokens = [0] * self.random.randint(0, length) if self.random.random() < 0.7 else []
        tokens += [self.random.randint(0, 1) for _ in range(length - len(tokens))]
        request_id, priority = f"r{self.submitted}", self.random.choice(self.priorities)
        self.submitted += 1
        self.prompts[request_id] = Prompt(tokens, new)
        for worker in (self.p, self.d):
            worker.submit(request_id, tokens, room if self.random.random() < 0.7 else 0, priority)
            worker.advance(*[PD.BootstrappedEvent(request_id)] * self.random.randint(1, 2))
        return True

    # Rounds ----------------------------------------------------------------------------------------------------------

    def round(self) -> None:
        progress = self.progress
        idle = self.round_of_prefills() & self.round_of_decodes() & self.transfer()
        self.barren = self.barren + 1 if self.progress == progress else 0
        if self.disturbed:
            self.disturb()
        self.idle = self.idle + 1 if idle and not self.p.pending and not self.d.pending else 0
        # A round that only retracts is idle too. A recovery that finds no room for its end starts again and again.
        if self.idle > 4 or self.barren > 60:
            self.barren = 0
            self.time_out()

    def round_of_prefills(self) -> bool:
        """True when there was nothing to do."""
        if self.disturbed and self.random.random() < 0.2:
            return False
        step = self.p.plan()
        hand_off = step.hand_off
        for row, request_id in enumerate([] if hand_off is None else hand_off.ids):
            assert hand_off is not None
            self.take_hand_off(hand_off, row, request_id)
        while len(self.p.pending) > (self.random.randint(0, 2) if step.ids else 0):
            self.land_prefills()
        return not step.ids and hand_off is None

    def land_prefills(self) -> None:
        candidates: dict[str, list[int]] = {}
        if self.random.random() < 0.5:
            for landing in self.p.pending[0]:
                candidates[landing.request_id] = [*landing.tokens, self.random.randint(0, 9)]
        for landing in self.p.land(candidates):
            self.progress += len(landing.tokens)
            if landing.tokens:
                self.drafts[landing.request_id] = candidates.get(landing.request_id, [])

    def take_hand_off(self, hand_off: Step, row: int, request_id: str) -> None:
        prompt = self.prompts[request_id]
        device = self.p.device.requests[request_id]
        assert prompt.source is None
        assert hand_off.batch.decode_input_ids[row] == device.tokens[-1]
        assert hand_off.batch.spec_candidate_ids[row] == self.drafts[request_id]
        assert hand_off.batch.prefill_lengths[row] == device.computed == len(prompt.tokens)
        self.progress += 1
        prompt.source = [hand_off.row(request_id, group) for group in range(len(self.groups))]

    def round_of_decodes(self) -> bool:
        if self.disturbed and self.random.random() < 0.2:
            return False
        step = self.d.plan()
        self.check_first_tokens(step)
        landing = step.landing
        if landing is not None:
            (request_id,) = landing.ids
            prompt = self.prompts[request_id]
            assert landing.batch.input_ids == prompt.tokens[landing.prefixes[0] :]
            assert landing.prefixes[0] + landing.inputs[0] == len(prompt.tokens)
            self.progress += 1
            prompt.target = [landing.row(request_id, group) for group in range(len(self.groups))]
            prompt.hit = landing.prefixes[0]
        while len(self.d.pending) > (self.depth if step.ids else 0):
            self.land_decodes()
        return not step.ids and landing is None

    def check_first_tokens(self, step: Step) -> None:
        for index, token in enumerate(step.batch.decode_input_ids):
            request_id = step.ids[step.batch.num_extends() + index]
            prompt = self.prompts[request_id]
            if token == -1:
                assert not prompt.landed, "a token that a peer computed is on no device here"
            prompt.landed = False

    def land_decodes(self) -> None:
        for landing in self.d.land({}):
            prompt = self.prompts[landing.request_id]
            prompt.generated += len(landing.tokens)
            self.progress += len(landing.tokens)
            if prompt.generated >= prompt.stop_after:
                self.finish(landing.request_id)

    def finish(self, request_id: str) -> None:
        self.d.end(request_id, named(ForwardEvent.Finish, request_id))
        del self.prompts[request_id]

    # Transfers -------------------------------------------------------------------------------------------------------

    def transfer(self) -> bool:
        """Completes some of the transfers that both sides are ready for; True when there was none."""
        ready = [r for r, prompt in self.prompts.items() if prompt.source is not None and prompt.target is not None]
        for request_id in ready:
            if not self.disturbed or self.random.random() < 0.6:
                self.complete(request_id)
        return not ready

    def complete(self, request_id: str) -> None:
        prompt = self.prompts[request_id]
        self.copy(prompt)
        token = self.p.device.requests[request_id].tokens[-1]
        self.d.device.requests[request_id] = DeviceRequest([*prompt.tokens, token], len(prompt.tokens))
        again = 2 if self.disturbed and self.random.random() < 0.2 else 1
        self.d.advance(*[PD.RemotePrefillDoneEvent(request_id, token)] * again)
        self.p.end(request_id, PD.SucceededEvent(request_id))
        self.p.advance(*[PD.SucceededEvent(request_id)] * (again - 1))
        prompt.source = prompt.target = None
        prompt.landed, prompt.generated = True, 1
        self.landings += 1
        self.progress += 1
        if prompt.stop_after == 1:
            self.finish(request_id)

    def copy(self, prompt: Prompt) -> None:
        assert prompt.source is not None
        assert prompt.target is not None
        size = len(prompt.tokens)
        for group, (source, target) in enumerate(zip(prompt.source, prompt.target, strict=True)):
            declared, g = self.groups[group], self.d.device.granularity(group)
            held = 0 if declared.replayable else prompt.hit
            if declared.state:
                first = size - 1
            elif declared.window is None:
                first = held
            else:
                first = max(held, size - declared.window + 1)
            for slot in range(first // g, (size - 1) // g + 1):
                assert source[slot] > 0, f"slot {slot} of group {group} is to be handed over"
                assert target[slot] > 0, f"slot {slot} of group {group} has nowhere to land"
                for row in range(g):
                    self.d.device.rows[group, target[slot], row] = self.p.device.rows.get((group, source[slot], row), 0)

    # Disturbances ----------------------------------------------------------------------------------------------------

    def disturb(self) -> None:
        for request_id, prompt in list(self.prompts.items()):
            if self.random.random() < 0.005:
                self.give_up(request_id)
            elif self.random.random() < 0.015:
                self.start_again(request_id, prompt)

    def give_up(self, request_id: str) -> None:
        for worker in (self.p, self.d):
            event = self.random.choice([PD.FailedEvent(request_id), named(ForwardEvent.Abort, request_id)])
            worker.end(request_id, event)
        del self.prompts[request_id]

    def start_again(self, request_id: str, prompt: Prompt) -> None:
        """A forward was not run, or a landing not asked for."""
        if prompt.target is not None:
            self.d.retract(request_id)
            self.p.end(request_id, PD.FailedEvent(request_id))
            prompt.source = prompt.target = None
        elif self.d.quiescent(request_id):
            self.d.retract(request_id)
            prompt.landed = False
        elif request_id in self.p.live and self.p.quiescent(request_id) and self.p.state(request_id) == "Prefilling":
            self.p.retract(request_id)

    def time_out(self) -> None:
        """Nothing moves on either side. Each may wait for the other while neither has room, which only a timeout ends;
        anything else would be a scheduler that has stopped for no reason."""
        waits_for_landing = [r for r, prompt in self.prompts.items() if prompt.source is not None]
        waits_for_prefill = [r for r, prompt in self.prompts.items() if prompt.target is not None]
        stuck = waits_for_landing + waits_for_prefill
        if self.prompts:
            assert stuck, f"stalled: { ({r: (self.p.state(r), self.d.state(r)) for r in self.prompts}) }"
            self.timeouts += 1
            self.give_up(stuck[0])

    def drain(self, rounds: int) -> None:
        for _ in range(rounds):
            if not self.prompts:
                break
            self.round()
        assert not self.prompts, f"still live: { ({r: (self.p.state(r), self.d.state(r)) for r in self.prompts}) }"
        for worker in (self.p, self.d):
            while worker.pending:
                worker.land({})
            worker.check_nothing_held()
