"""A program with Mosaic kernels is the same bytes in every process, so that the compilation cache finds it again."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("lowered_kernels.py"))


def digests(*, depth: int, hash_seed: int) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, SCRIPT, str(depth)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_two_processes_lower_the_same_kernels_to_the_same_bytes() -> None:
    first, second = digests(depth=0, hash_seed=1), digests(depth=20, hash_seed=2)
    assert first == second
    assert len(set(first)) == 2
