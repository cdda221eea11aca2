"""`tokenspeed-jax plan` says what an engine would do, from `config.json` alone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jax._src import xla_bridge

from tokenspeed_jax import Engine, EngineConfig
from tokenspeed_jax.commands.main import main
from tokenspeed_jax.commands.plan import PlanConfig, make_plan
from tokenspeed_jax.engine.memory import group_lines
from tokenspeed_jax.options import CommandLine, Configuration
from tokenspeed_jax.weights import hub, safetensors_source

TINY = Path(__file__).parents[1] / "golden" / "tiny"


def plan(*words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    if code == 2:
        with pytest.raises(SystemExit) as end:
            main(["plan", *words])
        assert end.value.code == 2
    else:
        assert main(["plan", *words]) == code
    streams = capsys.readouterr()
    return streams.out if code == 0 else streams.err.strip().splitlines()[-1]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_plan_is_what_the_engine_does(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 4 << 20}
    words = [str(TINY / family), *(f"--{name.replace('_', '-')}={value}" for name, value in sizes.items())]
    text = plan(*words, capsys=capsys)
    line = CommandLine("plan", "", Configuration(PlanConfig), Configuration(EngineConfig, positional="model"))
    planned = make_plan(line.parse(words), None)
    config = EngineConfig(model=str(TINY / family), warmup=False, disable_progress_bars=True, **sizes)
    with Engine(config) as engine:
        report = engine.memory_report
        assert f"({report.weights} bytes)" in text
        assert f"({report.num_parents} parents of {report.parent_bytes} bytes)" in text
        assert "\n".join(group_lines(report.groups)) in text
        assert planned.device_state == pytest.approx(report.device_state, rel=0.05)
        assert planned.limits.max_model_len == engine.max_model_len


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "kimi_linear", "minimax", "mamba2", "lfm2"])
def test_every_kind_of_family_has_a_plan_from_its_configuration_alone(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(TINY / family / "config.json", tmp_path)
    monkeypatch.setattr(xla_bridge, "backends", lambda: pytest.fail("a plan needs no device"))
    monkeypatch.setattr(safetensors_source, "_read_header", lambda _: pytest.fail("a plan reads no weights"))
    text = plan(str(tmp_path), "--gpu-memory-gib=4", capsys=capsys)
    assert "group " in text
    assert "of which JAX may allocate 3.000 GiB" in text
    # The arena takes what is left of the share, but for less than a parent.
    free = re.search(r"free          ([0-9.]+) GiB", text)
    assert free is not None
    assert float(free[1]) == pytest.approx(3 * 0.1, abs=0.01)


def test_numbers_of_a_model_that_everyone_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3 8B: 8,030,261,248 parameters, and 131,072 bytes of keys and values per token in bfloat16."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = plan(str(tmp_path), "--gpu-memory-gib=80", "--jax-memory-fraction=0.9", capsys=capsys)
    assert f"({2 * 8_030_261_248} bytes)" in text
    assert "131072 bytes per token" in text
    requests = re.search(r"holds (\d+) requests of 8192 tokens", text)
    arena = re.search(r"cache arena   ([0-9.]+) GiB", text)
    assert requests is not None
    assert arena is not None
    # A GiB holds the 8,192 tokens of one request; the scheduler counts a page more for the steps in flight.
    assert float(arena[1]) - 1.5 < int(requests[1]) <= float(arena[1])
    small = plan(str(tmp_path), "--gpu-memory-gib=24", "--workspace-gib=1", capsys=capsys, code=2)
    assert "weights 14.958 GiB" in small.replace("14.957", "14.958")


def test_the_gpu_here_is_asked_through_nvidia_smi(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def smi(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, stdout="8192\n81559\n")

    monkeypatch.setattr(subprocess, "run", smi)
    assert "GPU           8.000 GiB" in plan(str(TINY / "llama"), capsys=capsys)


def test_only_config_json_of_a_hub_id_is_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        assert (name, revision, allow_patterns) == ("owner/name", "v2", list(hub.CONFIG_ONLY))
        return str(TINY / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    text = plan("owner/name", "--revision=v2", "--gpu-memory-gib=2", capsys=capsys)
    assert "owner/name: LlamaForCausalLM, bfloat16" in text


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--workspace-gib=2"], 2, ["--workspace-gib", "no effect", "--gpu-memory-gib"]),
        (["--gpu-memory-gib=nan"], 2, ["--gpu-memory-gib", "nan"]),
        (["--gpu-memory-gib=4", "--jax-memory-fraction=2"], 2, ["--jax-memory-fraction", "2.0"]),
        (["--gpu-memory-gib=4", "--workspace-gib=-1"], 2, ["--workspace-gib", "-1.0"]),
        (["--warmup"], 2, ["unknown option --warmup"]),
        (["--revision=v2"], 2, ["--revision", "no effect", "no hub id"]),
        (["--context-length=4096"], 2, ["--context-length", "4096", "2048"]),
        (["--gpu-memory-gib=1"], 2, ["--gpu-memory-utilization", "workspace 1.000 GiB"]),
    ],
)
def test_what_cannot_be_planned_says_why(
    words: list[str], code: int, says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = plan(str(TINY / "llama"), *words, capsys=capsys, code=code)
    assert all(part in line for part in says), line


def test_a_folder_without_a_configuration_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "lacks config.json" in plan(str(tmp_path), "--gpu-memory-gib=1", capsys=capsys, code=1)
    (tmp_path / "config.json").write_text('{"architectures": ["MarvinForCausalLM"]}')
    assert "MarvinForCausalLM" in plan(str(tmp_path), "--gpu-memory-gib=1", capsys=capsys, code=1)
