"""Every scenario of the specification has a test that carries its id, and every invariant one that is named for it.

A scenario S-SC7 is `sc7` in the name of a Python test or in the id of a parameter, `SC7` in the name of a C++ test.
Comments and docstrings do not count: they are not run.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {ROOT / "tests/scheduler": "*.py", ROOT / "scheduler_cpp/tests": "*_test.cpp"}

# Section 20 of the scheduler's specification: how many scenarios each of its parts has.
SCENARIOS = {
    "BP": 14,  # pool and references
    "GT": 12,  # tables and geometry
    "PM": 24,  # matching
    "EV": 20,  # admission and eviction
    "AR": 12,  # arithmetic
    "SC": 31,  # plans without prefix reuse
    "PX": 15,  # prefix reuse
    "ST": 16,  # state checkpoints
    "RT": 17,  # retraction
    "HT": 20,  # host tier
    "L3": 15,  # external store
    "PD": 14,  # disaggregation
    "RP": 9,  # bounded replay
    "CM": 10,  # capacity
    "KV": 4,  # events
    "VA": 5,  # validation
}
CATALOGUE = {f"{part}{number}" for part, count in SCENARIOS.items() for number in range(1, count + 1)}
INVARIANTS = [f"I{number}" for number in range(1, 57)]  # section 19

PYTHON_NAME = re.compile(r'^def test_(\w+)\(|\bid="([^"]+)"', re.MULTILINE)
CPP_NAME = re.compile(r"^TEST(?:_F|_P)?\(\w+,\s*(\w+)\)", re.MULTILINE)


def names() -> list[str]:
    """Of all tests and their parameters; those of Python in capitals, so that both languages spell an id alike."""
    found = []
    for folder, pattern in FOLDERS.items():
        for path in sorted(folder.glob(pattern)):
            text = path.read_text()
            if path.suffix == ".cpp":
                found += CPP_NAME.findall(text)
            else:
                found += [(function or parameter).upper() for function, parameter in PYTHON_NAME.findall(text)]
    return found


def test_every_scenario_has_a_test_that_carries_its_id() -> None:
    an_id = re.compile(rf"(?:{'|'.join(SCENARIOS)})\d+")
    carried = {token for name in names() for token in re.split(r"[^A-Za-z0-9]|_", name) if an_id.fullmatch(token)}
    assert len(CATALOGUE) == 238
    assert sorted(CATALOGUE - carried) == []
    assert sorted(carried - CATALOGUE) == [], "no such scenario"


def test_every_invariant_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (I\d+) \|.*\| (.+) \|$", (ROOT / "tests/scheduler/README.md").read_text(), re.MULTILINE)
    assert [invariant for invariant, _ in rows] == INVARIANTS
    for invariant, tests in rows:
        files = re.findall(r"`([^`]+)`", tests)
        assert files, invariant
        for file in files:
            assert any((folder / file).is_file() for folder in FOLDERS), f"{invariant}: {file}"
