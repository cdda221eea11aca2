"""Every command of docs/cli.md works as it stands there."""

import io
import json
import re
import shlex
from pathlib import Path

import pytest

from tokenspeed_jax.commands import generate
from tokenspeed_jax.commands.main import COMMANDS, main
from tokenspeed_jax.options.refused import REFUSED
from tokenspeed_jax.serve import cli
from tokenspeed_jax.serve.options import parse_options

from ..serve.fake_engine import FakeEngine
from .test_generate import TINY, ScriptedEngine

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the commands run, with the files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    for kind, block in BLOCKS:
        if kind == "yaml":
            name = re.match(r"# (\S+)\n", block)
            assert name is not None
            (tmp_path / name[1]).write_text(block)
    row = {"timestamp": 0, "input_length": 40, "output_length": 4, "hash_ids": [3]}
    (tmp_path / "mooncake.jsonl").write_text(f"{json.dumps(row)}\n" * 12)
    return tmp_path


def test_the_page_has_commands_of_every_kind() -> None:
    assert {line.partition("tokenspeed-jax ")[2].split()[0] for line in LINES} == set(COMMANDS)


@pytest.mark.parametrize("line", [line for line in LINES if "bench" not in line])
def test_a_command_without_a_server(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del folder
    engine = type("Engine", (ScriptedEngine,), {"configs": [], "asked": []})
    monkeypatch.setattr(generate, "Engine", engine)
    monkeypatch.setattr(cli, "main", lambda argv, prog: 0 if parse_options(argv, prog) else 1)
    before, _, words = line.replace("PATH", str(TINY / "llama")).partition("tokenspeed-jax ")
    monkeypatch.setattr("sys.stdin", io.StringIO(before.removeprefix("echo ") if before else "Hi\n"))
    assert main(shlex.split(words)) == 0
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in LINES if "bench" in line])
def test_a_bench_command(line: str, folder: Path, base_url: str, engine: FakeEngine) -> None:
    words = shlex.split(line.partition("tokenspeed-jax ")[2])
    assert main([*words, "--base-url", base_url, "--disable-tqdm"]) == 0
    assert len(engine.submitted) == int(words[words.index("--num-prompts") + 1])
    assert ("--output-json" in line) == (folder / "results.json").exists()


def test_the_tables_of_names_are_true(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `(--[a-z-]+)`(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) >= 9
    for theirs, ours, rest in rows:
        pairs = []
        for name in (theirs, ours):
            for value in ([], ["8"], ["0.5"]):
                words = [name, *value] if name.startswith("--model") else ["m", name, *value]
                try:
                    pairs.append(parse_options(words))
                    break
                except SystemExit:
                    continue
        assert len(pairs) == 2
        assert pairs[0] == pairs[1], theirs
        assert ("with a note" in rest) == ("note: " in "".join(capsys.readouterr().err))
    for name in ("--tensor-parallel-size", "--schedule-policy", "--trust-remote-code", "--max-prefill-tokens"):
        assert name in REFUSED
