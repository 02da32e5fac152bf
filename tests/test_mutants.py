"""What `make mutants` draws, and how it learns which test reaches a place."""

from __future__ import annotations

import ast
import importlib.util
import random
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SPEC = importlib.util.spec_from_file_location("mutation_places", SCRIPTS / "mutation_places.py")
assert SPEC is not None
assert SPEC.loader is not None
places = sys.modules["mutation_places"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(places)

CODE = '''
from __future__ import annotations
LIMIT = 3

def first(x: int) -> int:
    """Say something."""
    if x > LIMIT:
        return x + 1
    elif x < 0:
        return x - 1
    return x

def second(x):
    return x
'''


def test_a_seed_draws_the_same_changes() -> None:
    """Each is Python, in a place of its own, and differs from the code in one line."""
    drawn = places.draw(["minicluster/stats"], 4, random.Random(1))  # noqa: S311
    assert drawn == places.draw(["minicluster/stats"], 4, random.Random(1))  # noqa: S311
    assert drawn != places.draw(["minicluster/stats"], 4, random.Random(2))  # noqa: S311
    assert len({(each.path, each.line, each.column) for each in drawn}) == 4
    for mutant in drawn:
        code = (places.ROOT / mutant.path).read_text().splitlines()
        changed = mutant.source(places.ROOT).splitlines()
        ast.parse("\n".join(changed))
        assert [n for n, (old, new) in enumerate(zip(code, changed, strict=True), 1) if old != new]


@pytest.mark.parametrize(
    ("position", "reached_by"),
    [
        ((7, 7), {5, -1, 0}),
        ((8, 17), {5}),
        ((9, 11), {-1, 0}),
        ((10, 17), {-1}),
        ((11, 11), {0}),
        ((3, 8), {5, -1, 0}),
    ],
)
def test_a_probe_notes_who_gets_there(position: tuple[int, int], reached_by: set[int]) -> None:
    """A branch is reached by the calls that take it; a constant by every call."""
    tree = ast.parse(CODE)
    places.insert_probe(tree, 1, (3, 8))  # of another mutant of the file
    places.insert_probe(tree, 0, position)
    code = ast.unparse(tree).replace("__import__('mutants_probe').reached", "note")
    notes: list[int] = []
    names: dict[str, object] = {"note": notes.append}
    exec(compile(code, "code", "exec"), names)  # noqa: S102
    first = names["first"]
    assert callable(first)
    assert first.__doc__ == "Say something."
    reaching = set()
    for value in (5, -1, 0):
        notes.clear()
        first(value)
        reaching |= {value} if 0 in notes else set()
    assert reaching == reached_by
