"""Every worked example T1 to T21 of cache-runtime.md 27 has a test that carries its id, or a reason why it has none.

A vector T9 is `t9` in the name of a Python test, `T9` in the name of a C++ test. Comments and docstrings do not count:
they are not run.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VECTORS = {f"T{number}" for number in range(1, 22)}

NOT_BUILT = {
    "T15": "nothing verifies drafted tokens, so no step resolves or commits a state for them",
    "T17": "no family has replayable groups, so no writer has a floor; the scheduler's part is in test_replay.py",
    "T18": "no verification, hence no rows to replay and no staging; no recipe reserves a workspace",
}
PARTLY_BUILT = {
    "T8": "nothing translates a block id into its owner's own ids; tested are the counts, and the order of allocation",
    "T16": "no host arena, so no host_lcm and no offsets in it; tested are the bytes of a block, which it is made of",
}

PYTHON_NAME = re.compile(r"^def test_(\w+)\(", re.MULTILINE)
CPP_NAME = re.compile(r"^TEST(?:_F|_P)?\(\w+,\s*(\w+)\)", re.MULTILINE)
AN_ID = re.compile(r"[Tt]\d+")


def carried() -> set[str]:
    """The ids in the names of all tests that need no particular machine."""
    names = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.parent.name != "gpu":
            names += PYTHON_NAME.findall(path.read_text())
    for path in (ROOT / "scheduler_cpp/tests").glob("*_test.cpp"):
        names += CPP_NAME.findall(path.read_text())
    return {part.upper() for name in names for part in name.split("_") if AN_ID.fullmatch(part)}


def test_every_vector_has_a_test_that_carries_its_id() -> None:
    found = carried()
    assert sorted(VECTORS - found - NOT_BUILT.keys()) == []
    assert sorted(found - VECTORS) == [], "no such vector"


def test_what_is_said_to_be_missing_is_missing() -> None:
    assert NOT_BUILT.keys() | PARTLY_BUILT.keys() <= VECTORS
    assert sorted(carried() & NOT_BUILT.keys()) == [], "is tested after all"
    assert not NOT_BUILT.keys() & PARTLY_BUILT.keys()
