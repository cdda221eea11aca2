"""Routed experts: which experts a sample's tokens went to, gathered as its steps land.

An engine with `enable_return_routed_experts` compiles steps that hand out the experts of all their tokens. They stay on
the device unless a request in the step's batch asks for its own.
"""

from dataclasses import dataclass

import jax
import numpy as np

from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.requests import SampleState


@dataclass(frozen=True)
class PendingExperts:
    """The experts of one dispatched step, for the samples that ask; none for most steps.

    Attributes:
        rows: rows of the batch whose samples ask.
        expert_ids: of every token of the step.
    """

    built: BuiltBatch | None = None
    rows: tuple[int, ...] = ()
    expert_ids: jax.Array | None = None

    @classmethod
    def of(cls, built: BuiltBatch, expert_ids: jax.Array | None) -> "PendingExperts":
        """Starts the way to the host of what a dispatched step hands out, if anybody in its batch asks for it.

        Args:
            expert_ids: `int16[tokens, moe_layers, top_k]`; None from an engine that does not return them.
        """
        if expert_ids is None:
            return cls()
        rows = tuple(row for row, sample in enumerate(built.samples) if sample.experts is not None)
        if not rows:
            return cls()
        expert_ids.copy_to_host_async()
        return cls(built, rows, expert_ids)

    def land(self) -> None:
        """Waits for the step and gives each sample its part; a sample that has ended has been told already."""
        if self.built is None:
            return
        expert_ids = np.asarray(self.expert_ids)
        view = self.built.layout.views(self.built.buffer)
        starts, lengths = view["query_starts"], view["kv_lens"]
        for row in self.rows:
            sample: SampleState = self.built.samples[row]
            if sample.experts is not None and not sample.finished:
                begin, end = int(starts[row]), int(starts[row + 1])
                sample.experts.put(int(lengths[row]) - (end - begin), expert_ids[begin:end])
