"""Options by any of their names: aliases, opposites, notes, refusals, contradictions, and the configuration file."""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.engine.config import EngineConfig, about
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.options import CommandLine, Configuration, option_name
from tokenspeed_jax.options.refused import REFUSED
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.options import parse_options


@dataclass(frozen=True)
class Oven:
    """Options of every kind.

    Attributes:
        cakes, breads: how many of these, and what the
            help says on a second line.
    """

    heat: int = field(metadata=about("degrees", section="heat", aliases=("temperature",)))
    share: float = field(default=0.5, metadata=about("of the power", alternative_to="watts"))
    watts: int | None = field(default=None, metadata=about("power"))
    fan: bool = field(default=True, metadata=about("blow", opposites=("still",)))
    mode: Literal["top", "both"] = field(default="both", metadata=about("which", spellings={"upper": "top"}))
    label: str | None = field(default=None, metadata=about("name", near_aliases={"title": "a title has capitals"}))
    dishes: Sequence[str] = field(default=(), metadata=about("what"))
    weights: Mapping[int, float] = field(default_factory=dict, metadata=about("of dishes"))
    cakes: int = 0
    breads: int = 0

    def __post_init__(self) -> None:
        if self.heat > 300:
            raise ConfigError(f"heat must be at most 300, got {self.heat}", field="heat")


def oven(*words: str, **changes: Any) -> Oven:
    return oven_line(**changes).parse(words).of(Oven)


@functools.cache
def oven_line(**changes: Any) -> CommandLine:
    return CommandLine("oven", "Bakes.", Configuration(Oven, positional="heat", **changes))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        oven(*words)
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_every_name_of_an_option_sets_its_field() -> None:
    assert oven("--heat=5").heat == oven("--temperature", "5").heat == 5
    assert [oven("--heat=5", word).fan for word in ("--fan", "--no-fan", "--still")] == [True, False, False]
    assert oven("--heat=5", "--mode=upper") == oven("--heat=5", "--mode", "top")
    assert oven("--heat=5", "--dishes", "a", "--dishes=b,c").dishes == ("a", "b,c")
    assert oven("--heat=5", "--weights", '{"3": 1.5}').weights == {3: 1.5}
    assert oven("--heat=5", "--cakes=1", "--label=--x").label == "--x"
    assert oven("--no_fan", "--heat=5").fan is False, "vLLM takes underscores too"


def test_a_near_alias_is_taken_and_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert oven("--heat=5", "--title", "Pie").label == "Pie"
    assert "--title is taken as --label: a title has capitals" in capsys.readouterr().err
    oven("--heat=5", "--label", "Pie")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--heat=5", "--temperature=6"], ["--heat", "--temperature", "contradict"]),
        (["--heat=5", "--heat=6"], ["--heat", "contradict"]),
        (["5", "--heat=6"], ["unexpected argument '5'", "--heat is given"]),
        (["5", "--fan", "--still"], ["--fan", "--still", "contradict"]),
        (["5", "--share=1", "--watts=7"], ["--share", "--watts", "no effect"]),
        (["5", "6"], ["unexpected", "'6'"]),
        (["--temprature", "5"], ["--temprature", "--temperature?"]),
        (["--temperature", "400"], ["--temperature", "300", "400"]),
        (["5", "--mode=side"], ["--mode", "top", "both", "'side'"]),
        (["5", "--weights=[1]"], ["--weights", "JSON", "'[1]'"]),
        (["5", "--weights={"], ["--weights", "JSON"]),
        (["5", "--still=yes"], ["--still"]),
        (["5", "--trust-remote-code"], ["--trust-remote-code", "never run"]),
        (["5", "--schedule-policy", "lpm"], ["--schedule-policy", "priority"]),
        (["5", "-tp", "2"], ["-tp", "one GPU"]),
        (["--fan"], ["required", "--heat"]),
        (["5", "--config", "/nowhere.yaml"], ["--config", "/nowhere.yaml", "No such file"]),
    ],
)
def test_mistakes_name_the_option_as_it_was_written(
    words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *words)
    assert all(part in line for part in says), line


def test_saying_the_same_twice_is_no_contradiction() -> None:
    assert oven("5", "--heat=5", "--temperature=5").heat == 5


def test_what_follows_two_dashes_is_a_positional() -> None:
    parsed = CommandLine("x", "", Configuration(Oven, positional="label", defaults={"heat": 1})).parse(["--", "--heat"])
    assert parsed.of(Oven).label == "--heat"


def test_omitted_options_are_unknown_and_defaults_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert oven("5").cakes == 0
    line = CommandLine("oven", "", Configuration(Oven, positional="heat", defaults={"cakes": 3}))
    assert line.parse(["5"]).of(Oven).cakes == 3
    with pytest.raises(SystemExit):
        oven("5", "--cakes=1", omitted=frozenset({"cakes"}))
    assert "unknown option --cakes" in capsys.readouterr().err


def test_help_is_grouped_and_takes_texts_from_field_or_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        oven("--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "heat: --heat INTEGER, --temperature INTEGER degrees" in text
    assert "how many of these, and what the help says on a second line (default: 0)" in text
    assert "--title is nearly the same" in text
    assert "--still turns it off" in text


def test_a_field_without_help_or_of_an_unknown_type_is_a_mistake_of_ours() -> None:
    bare = dataclasses.make_dataclass("Bare", [("size", int, 0)])
    odd = dataclasses.make_dataclass("Odd", [("size", bytes, field(default=b"", metadata=about("x")))])
    for kind in (bare, odd):
        with pytest.raises(TypeError):
            CommandLine("x", "", Configuration(kind))
    constraint = frozenset({"structured_outputs"})
    with pytest.raises(TypeError, match="same name"):
        CommandLine("x", "", Configuration(EngineConfig), Configuration(SamplingParams, omitted=constraint))


def file(folder: Path, text: str) -> str:
    path = folder / "options.yaml"
    path.write_text(text, encoding="utf-8")
    return f"--config={path}"


def test_a_file_sets_options_and_the_command_line_wins(tmp_path: Path) -> None:
    text = "temperature: 7\nno-fan: true\nmode: upper\ndishes: [pie, 'on']\nweights: {3: 1.5}\nshare: .25\n"
    config = file(tmp_path, text)
    expected = Oven(heat=7, fan=False, mode="top", dishes=("pie", "on"), weights={3: 1.5}, share=0.25)
    assert oven(config) == expected
    assert oven(config, "--heat=9", "--fan") == dataclasses.replace(expected, heat=9, fan=True)
    assert oven(config, "--watts=3").share == 0.5, "an alternative on the command line takes the file's place"
    assert oven(file(tmp_path, "heat: 3\nstill: false\n")).fan is True
    assert oven(file(tmp_path, ""), "3").heat == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("heat: 3\ntemprature: 4", ["options.yaml", "temprature", "temperature?"]),
        ("heat: 3\nheat: 4", ["options.yaml", "line 2", "'heat'", "twice"]),
        ("heat: 3\ntemperature: 4", ["heat in", "temperature in", "contradict"]),
        ("heat: x", ["heat in", "options.yaml", "integer", "'x'"]),
        ("heat: 3.0", ["heat in", "integer"]),
        ("heat: true", ["heat in", "one value"]),
        ("heat: [3]", ["heat in", "one value"]),
        ("heat:", ["heat in", "no value"]),
        ("heat: 3\nfan: 1", ["fan in", "true or false"]),
        ("heat: 3\nlabel: 1.10", ["label in", "text", "quotes"]),
        ("heat: 3\nmode: off", ["mode in", "text"]),
        ("heat: 3\nweights: 4", ["weights in", "mapping"]),
        ("heat: 400", ["heat in", "options.yaml", "at most 300"]),
        ("heat: 3\nwatts: 1\nshare: 1", ["share in", "watts in", "no effect"]),
        ("heat: 3\ntensor_parallel_size: 2", ["tensor_parallel_size in", "one GPU"]),
        ("heat: 3\nconfig: other.yaml", ["unknown option config"]),
        ("- heat", ["mapping"]),
        ("heat: [", ["options.yaml", "line"]),
        ("a: !!python/object:os.system x", ["options.yaml", "line 1"]),
        ("[" * 1000, ["options.yaml"]),
        ("3: 4", ["mapping"]),
        ("? [a]\n: 3", ["options.yaml"]),
        ("\x00", ["options.yaml"]),
    ],
)
def test_mistakes_in_a_file_name_key_and_file(
    tmp_path: Path, text: str, says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, file(tmp_path, text))
    assert all(part in line for part in says), line


def test_a_key_in_a_file_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("api-key: 987654", "api-key: '987654", "api-key: [987654]"):
        with pytest.raises(SystemExit):
            parse_options(["--model=m", file(tmp_path, text)])
        assert "987654" not in capsys.readouterr().err


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "heat": st.integers(0, 300),
        "share": st.floats(0, 1),
        "fan": st.booleans(),
        "mode": st.sampled_from(["top", "both"]),
        "label": st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1),
        "cakes": st.integers(-(10**20), 10**20),
        "dishes": st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1).map(tuple),
        "weights": st.dictionaries(st.integers(0, 99), st.floats(-5, 5), min_size=1),
    },
)


BAKED_AT_1 = CommandLine("oven", "", Configuration(Oven, defaults={"heat": 1}))


def as_words(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(option_name(name) if value else option_name("no_" + name))
        else:
            words += [f"{option_name(name)}={item}" for item in (value if isinstance(value, tuple) else [value])]
    return words


@settings(max_examples=40, deadline=None)
@given(in_file=VALUES, on_line=VALUES)
def test_any_values_come_back_from_file_and_command_line(
    tmp_path_factory: pytest.TempPathFactory, in_file: dict[str, Any], on_line: dict[str, Any]
) -> None:
    on_line.pop("weights", None)  # JSON on the command line, which another test reads
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in in_file.items()}
    config = file(tmp_path_factory.getbasetemp(), yaml.safe_dump(plain))
    expected = Oven(**{"heat": 1, **in_file, **on_line})
    assert BAKED_AT_1.parse([config, *as_words(on_line)]).of(Oven) == expected


@settings(max_examples=80, deadline=None)
@given(text=st.text() | st.from_regex(r"(heat|label|dishes|[a-z]{1,4}): ?[\[\]{}&*!|>'\"%@`a-z0-9 :,.-]{0,20}\n?"))
def test_no_file_brings_the_process_down(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "options.yaml").write_bytes(text.encode(errors="surrogatepass"))
    with contextlib.suppress(SystemExit):  # a refusal; any other exception is a crash
        oven(f"--config={folder / 'options.yaml'}")


SGLANG = {
    "--model-path": ("model", "m"),
    "--context-length": ("max_model_len", 512),
    "--max-running-requests": ("max_num_seqs", 4),
    "--chunked-prefill-size": ("max_num_batched_tokens", 128),
    "--mem-fraction-static": ("gpu_memory_utilization", 0.5),
    "--page-size": ("prefix_granularity", 32),
    "--random-seed": ("seed", 3),
    "--served-model-name": ("served_model_name", "n"),
    "--dtype": ("dtype", "bfloat16"),
}


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_names_reach_the_same_fields(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    field_name, value = SGLANG[name]
    model = [] if field_name == "model" else ["--model=m"]
    configurations = parse_options([*model, name, str(value)])
    assert [getattr(item, field_name) for item in configurations if hasattr(item, field_name)] == [value]
    differs = name in ("--chunked-prefill-size", "--mem-fraction-static", "--page-size")
    assert (f"note: {name}" in capsys.readouterr().err) == differs


@pytest.mark.parametrize(
    ("word", "field_name"),
    [("--disable-radix-cache", "enable_prefix_caching"), ("--disable-overlap-schedule", "overlap_schedule")],
)
def test_sglangs_switches_turn_ours_off(word: str, field_name: str) -> None:
    assert getattr(parse_options(["m", word])[0], field_name) is False


def test_nothing_is_both_refused_and_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: set[str] = set()
    add = argparse._ArgumentGroup.add_argument
    monkeypatch.setattr(
        argparse._ArgumentGroup,
        "add_argument",
        lambda self, *names, **kinds: (offered.update(names), add(self, *names, **kinds))[1],
    )
    CommandLine("x", "", Configuration(ServerConfig), Configuration(EngineConfig))
    assert {"--max-model-len", "--context-length", "--port"} <= offered
    assert not offered & REFUSED.keys()
