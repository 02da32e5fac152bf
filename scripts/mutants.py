"""
`make mutants`: does a test fail where the code is wrong?

Draws places of the code by a seed, lets the operators of cosmic-ray change one at a time in a copy
of the working tree, and runs the tests that reach that place until one fails: those of its folder
first, and of these the quickest.
One run of the unchanged copy says which tests reach which place and how long each takes: a call is
inserted there that notes PYTEST_CURRENT_TEST, which subprocesses inherit. docs/adr/0011-mutants.md
says why. Exit code 3 if fewer than --least per cent were killed, 2 where nothing could be tried.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree as ET

from mutation_places import PROBE, ROOT, Mutant, draw, insert_probe, tracked

from minicluster.errors import Exit

PACKAGES = ("minicluster", "sizing", "serving", "loadtest")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
NO_ENGINE = ("-m", "not engine and not simulated and not browser")
OF_THE_REPOSITORY = ("--ignore=tests/test_house.py", "--ignore=tests/test_rules.py")
"""A generated page that changes is no test of the number on it."""

TESTS_S = 150.0
"""Time budget per mutant: tests that reach it are run up to this total."""

SPARE = 3
"""Places drawn for each mutant that is wanted: no quick test reaches some."""

WORKERS = len(os.sched_getaffinity(0))
NOT_PASSED = {"failure", "error", "skipped"}
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(slots=True)
class Tests:
    """Result of the run of the unchanged copy."""

    seconds: dict[str, float] = field(default_factory=dict)
    of_place: dict[int, set[str]] = field(default_factory=dict)


def main() -> int:
    """Draw, map, mutate, report; return the exit code."""
    options = parsed()
    deadline = time.monotonic() + 60 * options.minutes
    rng = random.Random(options.seed)  # noqa: S311
    drawn = draw(options.paths, SPARE * options.sample, rng)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        say(f"{len(drawn)} places drawn; one run of the tests says which of them reach which place")
        tests = mapped(copy(place / "map"), drawn, options.tests)
        reached = [number for number in range(len(drawn)) if tests.of_place.get(number)]
        unreached = [drawn[n] for n in range(len(drawn)) if not tests.of_place.get(n)]
        chosen = reached[: options.sample]
        say(f"{len(tests.seconds)} tests passed; trying {len(chosen)} mutants")
        trees: SimpleQueue[Path] = SimpleQueue()
        for worker in range(WORKERS):
            trees.put(copy(place / f"tree{worker}"))

        def attempt(number: int) -> str | None:
            if time.monotonic() > deadline:
                return None
            tree, mutant = trees.get(), drawn[number]
            try:
                killer = tried(mutant, tests.of_place[number], tests.seconds, tree)
            finally:
                trees.put(tree)
            said = "killed" if killer else "SURVIVED: " + " -> ".join(mutant.lines())
            say(f"{mutant.path}:{mutant.line} {said}")
            return killer

        with ThreadPoolExecutor(WORKERS) as pool:
            found = dict(zip(chosen, pool.map(attempt, chosen), strict=True))
    return report({drawn[n]: what for n, what in found.items()}, unreached, options.least)


def parsed() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description="Mutate the code and run the tests that reach it.")
    parser.add_argument("--sample", type=int, default=40, help="mutants tried")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=13.5, help="no mutant is begun after that")
    parser.add_argument("--least", type=float, default=0, help="exit code 3 below so many per cent")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders")
    parser.add_argument("--paths", nargs="+", default=list(PACKAGES), help="code that is mutated")
    return parser.parse_args()


def mapped(tree: Path, drawn: list[Mutant], tests: list[str]) -> Tests:
    """Run the tests once with probes; return which passed, and which reached which place."""
    reached = tree / "reached"
    reached.mkdir()
    (tree / "mutants_probe.py").write_text(PROBE, encoding="utf-8")
    for path in {mutant.path for mutant in drawn}:
        here = {number: each for number, each in enumerate(drawn) if each.path == path}
        code = ast.parse((tree / path).read_text(encoding="utf-8"))
        for number, mutant in here.items():
            insert_probe(code, number, (mutant.line, mutant.column))
        (tree / path).write_text(ast.unparse(code), encoding="utf-8")
    parallel = ("-n", str(WORKERS), f"--timeout={TESTS_S:.0f}")
    selected = (*NO_ENGINE, *OF_THE_REPOSITORY, "--tb=no", "--junitxml=tests.xml", *tests)
    # A test that fails here, where there is no git and much to do, is not used; the map goes on.
    env = environment(tree) | {"MUTANTS_REACHED": str(reached)}
    env["PYTHONPATH"] = os.pathsep.join((str(tree), str(tree / "scripts")))
    command = [*PYTEST, "-p", "mutation_caches", *parallel, *selected]
    subprocess.run(command, cwd=tree, env=env, check=False, stdout=sys.stderr)
    found = Tests()
    for case in ET.parse(tree / "tests.xml").iter("testcase"):  # noqa: S314  (our own)
        if all(each.tag not in NOT_PASSED for each in case):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            found.seconds[name] = float(case.get("time", 0))
    for file in reached.iterdir():
        hits = {tuple(line.rsplit(" (", 1)) for line in file.read_text().splitlines()}
        names = {name for name, _ in hits}
        # What a fixture reached, the other tests of its file reach too.
        shared = {name.split("::")[0] for name, phase in hits if phase == "setup)"}
        names |= {name for name in found.seconds if name.split("::")[0] in shared}
        found.of_place[int(file.name)] = names & found.seconds.keys()
    return found


def nearness(test: str, path: str) -> int:
    """Return how many folders of a file those of a test mirror."""
    pairs = zip(Path(test.split("::", maxsplit=1)[0]).parts[1:-1], Path(path).parts, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def tried(mutant: Mutant, names: set[str], seconds: dict[str, float], tree: Path) -> str:
    """Run tests against a mutant until one fails; return that one, or nothing if it survives."""
    chosen: list[str] = []
    for name in sorted(names, key=lambda each: (-nearness(each, mutant.path), seconds[each], each)):
        if chosen and sum(seconds[each] for each in (*chosen, name)) > TESTS_S:
            break
        chosen.append(name)
    (tree / "chosen.txt").write_text("\n".join(chosen), encoding="utf-8")
    file, source = tree / mutant.path, (tree / mutant.path).read_text(encoding="utf-8")
    file.write_text(mutant.source(tree), encoding="utf-8")
    command = [*PYTEST, "-x", "--tb=no", "-rfE", f"--timeout={TESTS_S:.0f}", "@chosen.txt"]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree),
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=3 * TESTS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "no end"
    finally:
        file.write_text(source, encoding="utf-8")
    failed = FAILED.search(said)
    killer = failed[1] if failed else "collection"
    return "" if process.returncode == 0 else killer


def report(found: dict[Mutant, str | None], unreached: list[Mutant], least: float) -> int:
    """Print the table; return the exit code."""
    for mutant, killer in sorted(found.items(), key=lambda item: (item[0].path, item[0].line)):
        outcome = "not tried" if killer is None else f"killed by {killer}" if killer else "SURVIVED"
        old, new = mutant.lines()
        sys.stdout.write(f"{mutant.path}:{mutant.line}  {outcome}\n    - {old}\n    + {new}\n")
    if unreached:
        places = ", ".join(sorted(f"{each.path}:{each.line}" for each in unreached))
        sys.stdout.write(f"Drawn, but reached by none of these tests: {places}\n")
    done = [killer for killer in found.values() if killer is not None]
    killed = sum(map(bool, done))
    if not done:
        say("nothing was tried")
        return Exit.BAD_INPUT
    late = f", {len(found) - len(done)} not tried in time" if len(found) > len(done) else ""
    survived = len(done) - killed
    sys.stdout.write(f"{len(done)} mutants: {killed} killed, {survived} survived{late}\n")
    return Exit.DONE if 100 * killed >= least * len(done) else Exit.NEGATIVE


def copy(tree: Path) -> Path:
    """Copy the working tree, without what git ignores; return where it is."""
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


def environment(tree: Path) -> dict[str, str]:
    """Return an environment in which the copy is imported; stale bytecode would hide a mutant."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def say(what: str) -> None:
    """Talk on stderr."""
    sys.stderr.write(f"mutants: {what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
