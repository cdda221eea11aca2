"""`tokenspeed_jax.serve` with a device that has no memory left in the middle of its work."""

import itertools
import sys

import jax

from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.serve.cli import main

FAILING_STEP = 25

run = StepPrograms.run
steps = itertools.count(1)


def failing_run(programs: StepPrograms, *args: object):
    if next(steps) == FAILING_STEP:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: injected fault")
    return run(programs, *args)


StepPrograms.run = failing_run

if __name__ == "__main__":
    sys.exit(main())
