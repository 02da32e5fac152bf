"""Who imports whom: no circles, few floors, and little that a plan does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("minicluster", "sizing", "loadtest", "serving")

FLOORS = 9
"""Longest chain of modules of the planner, studies included, each of which imports the next."""

PLAN_FILES = 122
"""Files of ours that hold code and are imported by `sizing plan`."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {name_of(path): path for path in files}


def imported(name: str) -> set[str]:
    """Modules of ours that a module imports, for types only and inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= modules().keys() else {node.module, *inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & modules().keys()) - {name}


@cache
def graph() -> dict[str, set[str]]:
    return {name: imported(name) for name in modules()}


def test_no_module_imports_itself_by_others() -> None:
    """Types count, too: a module that names another's class stands above it."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_planner_has_few_floors() -> None:
    """A reader of a plan's search climbs no more of them."""
    floor: dict[str, int] = {}
    for name in TopologicalSorter(graph()).static_order():
        if name.startswith("sizing.planner."):
            below = (floor[each] for each in graph()[name] if each in floor)
            floor[name] = 1 + max(below, default=0)
    assert max(floor.values()) <= FLOORS, max(floor, key=lambda name: floor[name])


def test_a_plan_imports_little() -> None:
    """Of the house, `sizing plan` reads what it needs; what a page or a study needs it leaves."""
    code = (
        "import sys; from sizing.cli import main\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", "llama-3.1-8b-h100", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ours = modules().keys() & set(done.stderr.split())
    files = [name for name in ours if len(modules()[name].read_text().splitlines()) > 1]
    assert len(files) <= PLAN_FILES, sorted(files)
