"""The words of the specification for a scheduler with a host tier: stores, loads, acknowledgements."""

from collections.abc import Sequence

from tokenspeed_jax.scheduler import Cache

from .scenario import Group, Scenario, Step, extend_result
from .simulated_tiers import Operation, write_back_done, write_backs


class TierScenario(Scenario):
    def __init__(self, groups: Sequence[Group], usable: int, host: int, **fields: object) -> None:
        super().__init__(groups, usable, num_host_pages=host + 1, **fields)
        self.acknowledges = False  # every store, in the plan that starts it

    def plan(self) -> Step:
        step = super().plan()
        if self.acknowledges:
            self.stored(*write_backs(step))
        return step

    def stored(self, *ops: Operation) -> None:
        self.advance(*(write_back_done(op.op_id) for op in ops))

    def loaded(self, *ops: Operation, success: bool = True) -> None:
        self.advance(*(Cache.LoadBackDoneEvent(op.op_id, success) for op in ops))

    def end(self, request_id: str, token: int = 8) -> Step:
        """Lands the decode step that is out, finishes, plans."""
        self.land(request_id, token)
        self.finish(request_id)
        return self.plan()

    def register(self, tokens: Sequence[int], pages: slice = slice(None)) -> None:
        """Keys of a prompt's pages, as an external store would name them."""
        hashes = self.scheduler.prefix_hashes_for_tokens(tokens)[pages]
        self.scheduler.register_storage_keys(*self.scheduler.expand_prefix_keys(hashes))

    @property
    def pins(self) -> int:
        return self.scheduler.host_pinned_blocks()

    @property
    def cached(self) -> int:
        return self.scheduler.host_cached_blocks()


def land_all(s: Scenario, step: Step, token: int = 5) -> None:
    """Results of all rows: a token where the prompt is complete or a decode ran."""
    results = []
    for row, request_id in enumerate(step.ids):
        chunk = row < step.batch.num_extends()
        whole = not chunk or step.prefixes[row] + step.inputs[row] == step.batch.prefill_lengths[row]
        results.append(extend_result(request_id, [token] if whole else []))
    s.advance(*results)
