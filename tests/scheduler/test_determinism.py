"""The same calls give byte-identical plans, also in a process with other hash seeds and another memory layout (I53)."""

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Runs the calls of `digests` in a process of its own, after taking memory up in a way of its own.
CHILD = """
import sys
garbage = [bytearray(17 * (n % 997)) for n in range(int(sys.argv[1]))]
del garbage[::3]
from tests.scheduler.test_determinism import digests
print(digests(int(sys.argv[2])))
"""


def digests(seed: int) -> str:
    """A digest over every field of every plan, every gauge and every event of a random workload."""
    import hashlib

    from .plan_content import content, gauges
    from .random_configurations import GROUP_SETS
    from .workload import P, Workload

    whole = hashlib.sha256()
    for which, groups in enumerate(GROUP_SETS[::2]):
        source = random.Random(seed * 1000 + which)
        work = Workload(
            groups,
            usable=18,
            seed=seed + which,
            budget=16 + P,
            max_batch_size=4,
            enable_kv_cache_events=True,
            max_kv_events=source.choice([5, 1000]),
            enable_mixed_prefill_decode=source.random() < 0.5,
            overlap_schedule_depth=source.randint(0, 1),
            decode_input_tokens=source.randint(1, 2),
        )
        work.priorities = (0, 1, 2)
        for _ in range(20):
            if len(work.live) < 8:
                work.submit()
            step = work.round()
            work.disturb()
            whole.update(repr(content(step.plan)).encode())
            ids = [f"r{number}" for number in range(work.submitted)]
            whole.update(repr(gauges(work.scheduler, [f"g{g}" for g in range(len(groups))], ids)).encode())
            whole.update(repr(content(work.scheduler.drain_kv_events())).encode())
    return whole.hexdigest()


def run(hash_seed: str, garbage: int, seed: int) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "MALLOC_PERTURB_": str(garbage % 255)}
    environment["PYTHONPATH"] = os.pathsep.join([entry for entry in sys.path if entry] + [str(ROOT)])
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(garbage), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_two_processes_plan_the_same_to_the_byte() -> None:
    first = run("0", garbage=0, seed=1)
    assert len(first) == 64
    assert run("12345", garbage=100_003, seed=1) == first
    assert digests(seed=2) != first, "the digest must see the calls"
