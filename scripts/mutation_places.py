"""Places that cosmic-ray's operators can change, and probes that record which tests reach them."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

if TYPE_CHECKING:
    import random

ROOT = Path(__file__).parents[1]
BITS = {"BitOr", "BitAnd", "BitXor", "LShift", "RShift"}
IDENTITY = {"Is", "IsNot"}

PROBE = """
import os

_seen = set()

def reached(place):
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test and (place, test) not in _seen:
        _seen.add((place, test))
        with open(f"{os.environ['MUTANTS_REACHED']}/{place}", "a") as file:
            file.write(test + "\\n")
"""
"""A module of its own in the copy; subprocesses inherit both variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: the operator's so many-th occurrence in a file."""

    path: str
    line: int
    column: int
    operator: str
    occurrence: int

    def source(self, tree: Path) -> str:
        """Return the file with the change."""
        code = (tree / self.path).read_text(encoding="utf-8")
        changed = mutate_code(code, OperatorProvider()[self.operator](), self.occurrence)
        return str(changed)

    def lines(self) -> tuple[str, str]:
        """Return the line before and after the change."""
        code = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        pairs = zip(code, self.source(ROOT).splitlines(), strict=False)
        return next((old.strip(), new.strip()) for old, new in pairs if old != new)


def draw(paths: list[str], count: int, rng: random.Random) -> list[Mutant]:
    """Return so many mutants, each at a place of its own, in the order in which to try them."""
    files = [file for path in paths for file in tracked(path)]
    sizes = [len((ROOT / file).read_bytes()) for file in files]
    found: dict[str, dict[tuple[int, int], list[Mutant]]] = {}
    drawn: list[Mutant] = []
    for _ in range(20 * count):  # a file may have fewer places than draws
        if len(drawn) == count:
            break
        [path] = rng.choices(files, weights=sizes)
        places = found[path] = found[path] if path in found else mutants(path)
        if places:
            mutant = rng.choice(places.pop(rng.choice(sorted(places))))
            drawn += [mutant] if matters(mutant) else []
    return drawn


def matters(mutant: Mutant) -> bool:
    """
    Tell whether a change is Python (the asterisk of a signature is no product) and is one.

    cosmic-ray's operator for exceptions fails on a dotted name (`except asyncio.CancelledError`).
    """
    try:
        ast.parse(mutant.source(ROOT))
    except (SyntaxError, AttributeError):
        return False
    return not any(harmless in mutant.lines()[1] for harmless in ("not TYPE_CHECKING", "not not "))


def mutants(path: str) -> dict[tuple[int, int], list[Mutant]]:
    """Return what the operators would do to a file, by line and column."""
    code = (ROOT / path).read_text(encoding="utf-8")
    nodes, quiet = list(ast_nodes(get_ast(code))), unheard(ast.parse(code))
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    for name in filter(sensible, OperatorProvider()):
        operator = OperatorProvider()[name]()
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(starts):
            if not any(first <= (line, column) < last for first, last in quiet):
                mutant = Mutant(
                    path=path, line=line, column=column, operator=name, occurrence=occurrence
                )
                found[line, column].append(mutant)
    return found


def sensible(name: str) -> bool:
    """Tell whether an operator's mutants run at all: no shifts of numbers, no order of None."""
    if OperatorProvider()[name].arguments() or name == "RemoveDecorator":
        return False
    _, old, new = (*name.split("_"), "", "")[:3]
    identities = IDENTITY & {old, new}
    return (old in BITS) == (new in BITS) and (not identities or identities == {old, new})


def unheard(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where a change has no effect or an absurd one: annotations and decorators."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found += node.decorator_list
        found += [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [
        ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0))
        for each in found
        if each is not None
    ]


def insert_probe(tree: ast.Module, number: int, position: tuple[int, int]) -> None:
    """Note that the statement at a position runs; outside functions, that one of them does."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = [f for f in functions if holds(f.body[0], f.body[-1], position)]
    if not inside:
        for function in functions:
            first = 0 if ast.get_docstring(function, clean=False) is None else 1
            put_probe(function.body, first, number)
        return
    blocks: list[list[ast.stmt]] = [
        block
        for node in ast.walk(inside[-1])
        for _, block in ast.iter_fields(node)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt)
    ]
    block = [b for b in blocks if any(holds(each, each, position) for each in b)][-1]
    index = next(i for i, each in enumerate(block) if holds(each, each, position))
    put_probe(block, index, number)


def put_probe(block: list[ast.stmt], index: int, number: int) -> None:
    """Insert a probe, which lies where the statement after it does, so that later ones find it."""
    [probe] = ast.parse(f"__import__('mutants_probe').reached({number})").body
    block.insert(index, ast.copy_location(probe, block[min(index, len(block) - 1)]))


def holds(first: ast.stmt, last: ast.stmt, position: tuple[int, int]) -> bool:
    """Tell whether a position lies between the start of one statement and the end of another."""
    end = (last.end_lineno or 0, last.end_col_offset or 0)
    return (first.lineno, first.col_offset) <= position < end


def tracked(*paths: str) -> list[str]:
    """Return the files of the working tree, or the Python files of some paths."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = sorted(set(filter(None, done.stdout.split("\0"))))
    names = [name for name in names if (ROOT / name).is_file()]
    return [name for name in names if name.endswith(".py")] if paths else names
