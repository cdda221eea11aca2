"""Scenarios of the two halves of a disaggregated worker, with the peer's side told by hand."""

from collections.abc import Sequence

from tokenspeed_jax.scheduler import PD, ForwardEvent, SchedulerConfig

from .scenario import FULL, Group, Scenario, Step, extend_result, named
from .simulated_tiers import write_back_done, write_backs

Role = SchedulerConfig.Role
TWO_FULL = (FULL, FULL)
SCATTERING_GROUPS = (Group(granularity=1, packing=3), Group(packing=2))


class PrefillWorker(Scenario):
    def __init__(self, groups: Sequence[Group], usable: int, **fields: object) -> None:
        super().__init__(groups, usable, role=Role.P, **fields)

    def start(self, request_id: str, prompt: int | Sequence[int], max_new: int = 0, **fields: object) -> None:
        """Submits and reports the handshake."""
        self.submit(request_id, prompt, max_new, **fields)
        self.advance(PD.BootstrappedEvent(request_id))

    def land_with(self, request_id: str, token: int, candidates: Sequence[int] = ()) -> None:
        self.advance(extend_result(request_id, [token], candidates))

    def succeed(self, request_id: str) -> None:
        self.advance(PD.SucceededEvent(request_id))

    def hand_over(self, request_id: str, prompt: int | Sequence[int]) -> Step:
        """Prefill, land, hand off, confirm, plan. Returns the first step."""
        self.start(request_id, prompt)
        step = self.plan()
        assert request_id in step.ids
        self.land_with(request_id, 7)
        hand_off = self.plan().hand_off
        assert hand_off is not None
        assert hand_off.ids == [request_id]
        self.succeed(request_id)
        self.plan()
        return step


def handed_off(step: Step) -> list[str]:
    return [] if step.hand_off is None else step.hand_off.ids


def run_scattered_prompt(s: PrefillWorker) -> list[int]:
    """A prompt of SCATTERING_GROUPS, in 10 parents and a budget of 6, that others leave too many half-full parents to.

    Returns its chunks, up to its hand-off. Copies to a host, if there is one, complete at once.
    """

    def plan() -> Step:
        step = s.plan()
        s.advance(*(write_back_done(op.op_id) for op in write_backs(step)))
        return step

    assert s.scheduler.max_single_request_tokens() == 16
    # Found by random search: what these leave behind spreads the first two chunks over too many parents.
    for request_id, length in (("a", 1), ("b", 2), ("c", 2), ("x", 2), ("y", 3)):
        s.start(request_id, length)
        assert plan().ids == [request_id]
        if request_id in "xy":
            s.land_with(request_id, 7)
            plan()
            s.succeed(request_id)
    s.start("long", 16)
    inputs = []
    for other in ("c", "b", "a", *[""] * 7):
        step = plan()
        inputs += step.inputs
        if step.ids:
            s.land("long", *([1] if step.prefixes[0] + step.inputs[0] == 16 else []))
        if other:
            s.abort(other)
        if handed_off(step):
            break
    assert handed_off(step) == ["long"]
    return inputs


class DecodeWorker(Scenario):
    def __init__(self, groups: Sequence[Group], usable: int, **fields: object) -> None:
        super().__init__(groups, usable, role=Role.D, **fields)

    def start(self, request_id: str, prompt: int | Sequence[int], max_new: int = 0, **fields: object) -> None:
        """Submits and reports the handshake."""
        self.submit(request_id, prompt, max_new, **fields)
        self.advance(PD.BootstrappedEvent(request_id))

    def done(self, request_id: str, token: int = 42) -> None:
        self.advance(PD.RemotePrefillDoneEvent(request_id, token))

    def retract(self, request_id: str) -> None:
        self.advance(named(ForwardEvent.Retract, request_id))

    def landing(self) -> Step:
        """The prompt that this round asks the peer for."""
        step = self.plan().landing
        assert step is not None
        return step

    def receive(self, request_id: str, prompt: int | Sequence[int], max_new: int = 0) -> Step:
        """A whole prompt that nobody is in the way of, landed. Returns its row."""
        self.start(request_id, prompt, max_new)
        step = self.landing()
        assert step.ids == [request_id]
        self.done(request_id)
        return step


def landing_ids(step: Step) -> list[str]:
    return [] if step.landing is None else step.landing.ids


def blocked_pair(**fields: object) -> DecodeWorker:
    """r1 and r2 fill the pool; in the next round neither can grow."""
    s = DecodeWorker(TWO_FULL, 12, **fields)
    s.start("r1", 4)
    s.start("r2", 4)
    assert [landing_ids(s.plan()) for _ in range(2)] == [["r1"], ["r2"]]
    assert s.available == 0
    s.done("r1")
    s.done("r2")
    for token in (1, 2):
        assert s.plan().ids == ["r1", "r2"]
        s.advance(extend_result("r1", [token]), extend_result("r2", [token]))
    return s
