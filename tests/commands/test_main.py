"""`tokenspeed-jax`: one name, four commands."""

import importlib
import tomllib
from pathlib import Path

import pytest

import tokenspeed_jax
from tokenspeed_jax.commands.main import COMMANDS, main
from tokenspeed_jax.serve import cli

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_console_script_is_main() -> None:
    module, _, name = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]["tokenspeed-jax"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_help_names_every_command_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command, does in COMMANDS.items():
        assert f"  {command} " in text
        assert does in text
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        assert f"usage: tokenspeed-jax {command}" in capsys.readouterr().out


def test_a_wrong_command_is_2_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    assert "did you mean generate?" in capsys.readouterr().err
    assert main([]) == 2
    assert "missing" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert tokenspeed_jax.__version__ in capsys.readouterr().out


def test_serve_is_the_servers_own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(cli, "main", lambda argv, prog: called.append((argv, prog)) or 7)
    assert main(["serve", "m", "--port=0"]) == 7
    assert called == [(["m", "--port=0"], "tokenspeed-jax serve")]


def test_a_reader_that_goes_away_ends_a_command_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "main", broken)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert main(["serve"]) == 1
        out.write("what was still in the buffer")
        out.flush()
    assert (tmp_path / "out").read_text() == ""
