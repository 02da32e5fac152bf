"""Equations of docs/model.md are those that docstrings name; the README has the newest errors."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("minicluster", "serving", "sizing")
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


def test_code_and_document_name_the_same_equations() -> None:
    """No docstring names one that is not there, and none is there that no code evaluates."""
    modules = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    texts = {str(path): path.read_text(encoding="utf-8") for path in modules}
    cited = {
        n: m for m, text in texts.items() for hit in CITED.findall(text) for n in expanded(hit)
    }
    assert {n: module for n, module in cited.items() if n not in equations()} == {}
    assert set(equations()) - set(cited) == set()


def test_equations_are_numbered_without_gaps() -> None:
    """Numbers are unique, and each section counts from 1."""
    sections: dict[str, list[int]] = {}
    for number in equations():
        sections.setdefault(number[0], []).append(int(number[1:]))
    assert sections
    for numbers in sections.values():
        assert numbers == list(range(1, len(numbers) + 1))


def test_the_readme_has_the_errors_of_the_validation_page() -> None:
    """Each class of rows: hardware, number, errors, and share inside the intervals."""
    validation, readme = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("docs/validation.md", "README.md")
    )
    table = validation.split("| class | hardware")[1].split("\n\n")[0]
    classes = [line.split(" | ") for line in table.splitlines()[2:]]
    rows = [" | ".join((*cells[:3], *cells[4:6])) for cells in classes]
    shown = [row for row in rows if row.split(" | ")[0] != "| static"]
    assert len(shown) > 5
    assert [row for row in shown if f"{row} |" not in readme] == []
