"""On a GPU too, a second start compiles nothing: the keys of programs with Mosaic kernels agree between processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = str(Path(__file__).parents[1] / "engine" / "start_once.py")
# Four layers of shapes that the Mosaic kernels serve.
CHANGES = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def start(folder: Path) -> dict[str, Any]:
    # The process of the tests holds three quarters of the memory already.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, SCRIPT, "qwen3", str(folder), json.dumps(CHANGES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert first["from_cache"] == 0
    assert second["compiled"] == 0
    assert second["from_cache"] == second["programs"] == first["programs"] > 5
    assert second["token_ids"] == first["token_ids"]
    assert [first["after_start"], second["after_start"]] == [0, 0]
