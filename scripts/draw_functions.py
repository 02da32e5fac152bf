"""
Ten functions drawn at random, with their paths: does the path alone say what each of them does?

`python scripts/draw_functions.py [--seed 1] [--count 10]`
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("minicluster", "sizing", "serving", "loadtest")


def main() -> None:
    """Print the path, name and first sentence of each function drawn."""
    parser = argparse.ArgumentParser(description="Draw functions of the packages at random.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    rng = random.Random(options.seed)  # noqa: S311
    found = functions()
    for path, name, says in sorted(rng.sample(found, options.count)):
        sys.stdout.write(f"{path}: {name}\n    {says}\n")
    sys.stdout.write(f"{options.count} of {len(found)} functions, seed {options.seed}\n")


def functions() -> list[tuple[str, str, str]]:
    """Return path, name and first docstring line of every function and method."""
    found = []
    for path in sorted(each for package in PACKAGES for each in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                says = (ast.get_docstring(node) or "(no docstring)").splitlines()[0]
                found.append((str(path.relative_to(ROOT)), node.name, says))
    return found


if __name__ == "__main__":
    main()
