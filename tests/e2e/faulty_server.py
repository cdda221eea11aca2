"""`tokenspeed_jax.serve` with a device that fails in the middle of its work."""

import itertools
import sys

from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.serve.cli import main

FAILING_STEP = 25

run = StepPrograms.run
steps = itertools.count(1)


def failing_run(programs: StepPrograms, *args: object):
    if next(steps) == FAILING_STEP:
        raise MemoryError("injected fault")
    return run(programs, *args)


StepPrograms.run = failing_run

if __name__ == "__main__":
    sys.exit(main())
