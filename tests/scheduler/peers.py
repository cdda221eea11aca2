"""Scenarios of the two halves of a disaggregated worker, with the peer's side told by hand."""

from collections.abc import Sequence

from tokenspeed_jax.scheduler import PD, ForwardEvent, SchedulerConfig

from .scenario import Group, Scenario, Step, extend_result, named

Role = SchedulerConfig.Role


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
