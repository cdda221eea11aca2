"""Parameters that are spread over a trainer's mesh feed an engine without the host, and give what whole ones give."""

import subprocess
import sys
from pathlib import Path


def test_sharded_parameters_give_what_those_of_one_device_give() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    paths = ":".join(path for path in sys.path if path)
    script = str(Path(__file__).with_name("sharded_trainer.py"))
    subprocess.run([sys.executable, script], check=True, timeout=300, env=environment | {"PYTHONPATH": paths})
