"""
CPU seconds until help, a usage error and shell completion of the three commands are there.

    python benchmarks/cli_start.py

Prints the least of three runs each, user and system time; exit code 1 if one is over the budget.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

BUDGET_S = 0.4
RUNS = 3

LINES = (
    *("sizing --help", "serving --help", "loadtest --help"),
    *("sizing plan --help", "sizing train --help", "sizing place --help", "sizing day --help"),
    *("sizing compare --help", "sizing calibrate --help", "sizing simulate --help"),
    *("sizing fabric --help", "sizing fabric bom --help", "sizing export --help"),
    *("serving up --help", "serving scale --help", "serving measure --help"),
    *("serving cluster up --help", "loadtest run --help", "loadtest search --help"),
    *("sizing plna", "sizing plan --nonsense", "serving up", "loadtest run --rate x"),
    *("TAB: sizing pl", "TAB: serving ", "TAB: loadtest s", "TAB: sizing plan --", "TAB: sizing p"),
    *("TAB: serving up --", "TAB: loadtest run --", "TAB: sizing train --"),
)
"""Command lines; of those after `TAB`, bash asks how they go on."""


def command(line: str) -> tuple[list[str], dict[str, str]]:
    """Return what is run for a line, and its environment."""
    words = line.removeprefix("TAB: ").split(" ")
    name, environment = words[0], dict(os.environ, COLUMNS="80")
    program = [sys.executable, "-c", f"from {name}.cli import main; main()"]
    if not line.startswith("TAB: "):
        return [*program, *words[1:]], environment
    environment |= {f"_{name.upper()}_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
    return program, environment | {"COMP_CWORD": str(len(words) - 1)}


def cpu_s(line: str) -> float:
    """Return the CPU seconds of one run."""
    program, environment = command(line)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(program, env=environment, capture_output=True, check=False)  # noqa: S603  (ours)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the table."""
    print(f"{'command':28} {'CPU s':>6} {'budget':>7}")
    worst = 0.0
    for line in LINES:
        least = min(cpu_s(line) for _ in range(RUNS))
        worst = max(worst, least)
        print(f"{line:28} {least:6.2f} {BUDGET_S:7.1f}{'' if least <= BUDGET_S else '  over'}")
    sys.exit(worst > BUDGET_S)


if __name__ == "__main__":
    main()
