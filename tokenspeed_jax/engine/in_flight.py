"""`InFlight`: a step that was dispatched and whose outputs nobody has looked at yet."""

from dataclasses import dataclass

import jax
import numpy as np

from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.prompt_scorer import PendingScores
from tokenspeed_jax.engine.routed_experts import PendingExperts
from tokenspeed_jax.engine.step import StepOutputs, unpack_outputs


@dataclass(frozen=True)
class InFlight:
    """One step.

    Attributes:
        round_number: of its plan.
        packed: what it drew.
        scores, experts: what requests have asked for beside that.
        dispatched_at: seconds of `time.perf_counter`.
        weight_version: of the weights that it runs with.
    """

    round_number: int
    built: BuiltBatch
    packed: jax.Array
    scores: PendingScores
    experts: PendingExperts
    dispatched_at: float
    weight_version: int

    def land(self) -> StepOutputs:
        """Waits for the step; gives samples what they asked for beside their tokens, and returns these."""
        outputs = unpack_outputs(np.asarray(self.packed))
        self.scores.land()
        self.experts.land()
        return outputs
