"""The equations of docs/model.md and those that docstrings name are the same."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CITED = re.compile(r"\beqs?\.\s+((?:[A-Z]\d+(?:\s*(?:,|and|to|or)\s+)?)+)")
NUMBER = re.compile(r"[A-Z]\d+")


def equations() -> list[str]:
    """Return the numbers of docs/model.md in their order."""
    text = (ROOT / "docs" / "model.md").read_text(encoding="utf-8")
    return re.findall(r"^- \*\*([A-Z]\d+)\*\*", text, re.MULTILINE)


def expanded(citation: str) -> set[str]:
    """Return the numbers of a citation: `S2, S3`, or all of `C1 to C3`."""
    named = NUMBER.findall(citation)
    if " to " in citation:
        first, last = int(named[0][1:]), int(named[-1][1:])
        named = [f"{named[0][0]}{n}" for n in range(first, last + 1)]
    return set(named)


def cited() -> dict[str, set[str]]:
    """Return the numbers that each module names."""
    found: dict[str, set[str]] = {}
    modules = (
        path
        for room in ("minicluster", "serving", "sizing")
        for path in (ROOT / room).rglob("*.py")
    )
    for path in sorted(modules):
        text = path.read_text(encoding="utf-8")
        numbers = {n for hit in CITED.findall(text) for n in expanded(hit)}
        if numbers:
            found[str(path.relative_to(ROOT))] = numbers
    return found


def test_every_equation_that_code_names_is_in_the_document() -> None:
    """A docstring names no equation that docs/model.md does not have."""
    known = set(equations())
    unknown = {module: numbers - known for module, numbers in cited().items() if numbers - known}
    assert unknown == {}


def test_every_equation_of_the_document_is_named_by_code() -> None:
    """No equation of docs/model.md stands there without code that evaluates it."""
    named = set().union(*cited().values())
    assert set(equations()) - named == set()


def test_equations_are_numbered_without_gaps() -> None:
    """Numbers are unique, and each section counts from 1."""
    sections: dict[str, list[int]] = {}
    for number in equations():
        sections.setdefault(number[0], []).append(int(number[1:]))
    assert sections
    for numbers in sections.values():
        assert numbers == list(range(1, len(numbers) + 1))
