"""A plan's life and a request's life, as docs/index.md tells them, against imports."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_imports import ROOT, graph, modules

LIVES = {"A plan's life": ROOT / "docs", "A request's life": ROOT / "serving"}
"""Headings of docs/index.md, with the folder in which the paths of their steps begin."""

PATH = re.compile(r"\]\((\.\./[^)]+)\)|`([a-z_/]+(?:\.py|/))`")
STEP = re.compile(r"^\d+\. (.+)$", re.MULTILINE)

VALUES = {"serving.protocol.messages"}
"""Values and frames that all steps of a request share: they connect nothing."""

COMMAND = "sizing.cli.plan"
MOST_LINES = 370
"""Lines of a file on a plan's way that no step lists, at most."""

MOST_SHARE = 0.1
"""Share of the lines of a plan's way in files that no step lists, at most."""


@cache
def steps(heading: str) -> list[list[Path]]:
    """Return the files and folders of each step."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return [
        [(LIVES[heading] / (link or span)).resolve() for link, span in PATH.findall(step)]
        for step in STEP.findall(section)
    ]


@cache
def step_of(heading: str) -> dict[str, int]:
    """Return the step of each module that a life lists, itself or by its folder."""
    return {
        module: number
        for number, paths in enumerate(steps(heading), start=1)
        for path in paths
        for module, file in modules().items()
        if file == path or path in file.parents
    }


def lines(module: str) -> int:
    return len(modules()[module].read_text(encoding="utf-8").splitlines())


def way_of_a_plan() -> set[str]:
    """Return all modules that a plan may meet: what the command's planner imports, and so on."""
    way, front = set[str](), {"sizing.planner.plan"}
    while front:
        way |= front
        front = {module for name in front for module in graph()[name]} - way
    return way


@pytest.mark.parametrize("heading", LIVES)
def test_a_life_has_eight_steps_that_exist(heading: str) -> None:
    """Each names a file or a folder with code, and none is named by two steps."""
    assert len(steps(heading)) == 8
    paths = [path for step in steps(heading) for path in step]
    assert len(paths) == len(set(paths))
    for path in paths:
        assert any(file == path or path in file.parents for file in modules().values()), path


@pytest.mark.parametrize("heading", LIVES)
def test_imports_connect_all_steps_of_a_life(heading: str) -> None:
    """No step stands apart: its files import files of other steps, or are imported by them."""
    listed = {name: step for name, step in step_of(heading).items() if name not in VALUES}
    together = {1}
    for _ in range(8):
        for importer, module in ((i, m) for i in listed for m in graph()[i] & listed.keys()):
            pair = {listed[importer], listed[module]}
            together |= pair if pair & together else set()
    assert together == set(range(1, 9))


def test_a_plan_imports_only_what_earlier_steps_list() -> None:
    """The order of the steps is that of the layers of `sizing`."""
    listed = {
        name: step for name, step in step_of("A plan's life").items() if name.startswith("sizing.")
    }
    assert [
        f"{importer} (step {listed[importer]}) imports {module} (step {listed[module]})"
        for importer in sorted(listed.keys() & way_of_a_plan())
        for module in sorted(graph()[importer] & listed.keys())
        if listed[module] > listed[importer]
    ] == []


def test_the_command_meets_every_step_and_little_else() -> None:
    """A folder's files may be left out; what no step lists is short."""
    listed, way = step_of("A plan's life"), way_of_a_plan()
    assert "sizing.planner.plan" in graph()[COMMAND]
    for step in steps("A plan's life"):
        for path in step:
            assert any(
                file == path or path in file.parents for file in map(modules().__getitem__, way)
            ), path
    others = {module: lines(module) for module in way - listed.keys()}
    assert {name: count for name, count in others.items() if count > MOST_LINES} == {}
    assert sum(others.values()) <= MOST_SHARE * sum(map(lines, way))
