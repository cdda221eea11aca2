"""Runs a program of the shared scheduler harness with our adapter in place of its stub.

    python bench/scheduler/run.py HARNESS selftest.py --adapter adapter_ours
    python bench/scheduler/run.py HARNESS harness.py run --adapter adapter_ours --check
    python bench/scheduler/run.py HARNESS harness.py run --adapter adapter_peer --json peer.json

HARNESS is the folder with `harness.py`. `adapter_peer` needs the wheel `tokenspeed-scheduler`.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    harness, program, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        # The harness looks for adapters beside itself first, so the stub has to go.
        for source in Path(harness).glob("*.py"):
            shutil.copy(source, scratch)
        shutil.copy(Path(__file__).with_name("adapter_ours.py"), scratch)
        return subprocess.run([sys.executable, str(Path(scratch, program)), *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
