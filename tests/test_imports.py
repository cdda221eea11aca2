"""What may be imported: the engine needs no web server, no GGUF reader, and never torch."""

import subprocess
import sys
from pathlib import Path

ABSENT = (
    "torch",
    "transformers",
    "starlette",
    "uvicorn",
    "msgspec",
    "gguf",
    "prometheus_client",
    "h11",
    "llguidance",
    "opentelemetry",
    "openai",
    "anthropic",
)

PROGRAM = """
import importlib.abc
import sys


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ImportError(f"{{name}} must not be imported")


sys.meta_path.insert(0, Refuse())
from tokenspeed_jax import Engine, EngineConfig, SamplingParams

options = dict(max_model_len=128, kv_cache_memory_bytes=1 << 22, warmup=False, disable_progress_bars=True)
with Engine(EngineConfig(model={model!r}, dtype="float32", **options)) as engine:
    output = engine.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))[0]
assert len(output.samples[0].token_ids) == 3
assert not {{"tokenspeed_jax.options", "tokenspeed_jax.commands"}} & set(sys.modules)
"""


def run(program: str, folder: Path) -> None:
    # -P: the folder of the tree that is named like the package must not shadow the installed one.
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_engine_runs_without_torch_and_without_the_servers_libraries(tmp_path: Path) -> None:
    model = Path(__file__).parent / "golden" / "tiny" / "llama"
    run(PROGRAM.format(absent=ABSENT, model=str(model)), tmp_path)


def test_importing_every_module_never_imports_torch(tmp_path: Path) -> None:
    run(
        "import importlib, importlib.util, pkgutil, sys, tokenspeed_jax\n"
        # Modules of this name need the package of this name, which an extra brings.
        "optional = () if importlib.util.find_spec('triton') else ('.triton',)\n"
        "names = [m.name for m in pkgutil.walk_packages(tokenspeed_jax.__path__, 'tokenspeed_jax.')]\n"
        "assert {'tokenspeed_jax.recipes.plan', 'tokenspeed_jax.models.llama', 'tokenspeed_jax.serve.app',\n"
        "        'tokenspeed_jax.pallas_kernels.pages', 'tokenspeed_jax.rollout'} <= set(names), names\n"
        "[importlib.import_module(name) for name in names if not name.endswith(('__main__', *optional))]\n"
        "assert 'torch' not in sys.modules\n",
        tmp_path,
    )
