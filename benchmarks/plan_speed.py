"""
CPU seconds of whole `sizing plan` commands, verifying simulations included.

    python benchmarks/plan_speed.py [--runs 5]

User and system seconds, median of the runs, beside the limit of each scenario; imports, catalogs
and every thread count. Exits with 1 if one takes longer. On a machine that others use too, CPU
seconds grow by what they take of caches and clock.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

LIMITS_S = {"llama-3.1-70b-h100": 2.0, "deepseek-v3-h200": 5.0, "llama-3.1-70b-1024gpu": 15.0}
"""Time limit of each plan."""


def cpu_s(scenario: str) -> float:
    """Plan once in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from sizing.cli import main; main()", "plan", scenario]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    """Print a line a scenario."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    late = 0
    for scenario, limit_s in LIMITS_S.items():
        seconds = [cpu_s(scenario) for _ in range(runs)]
        middle = statistics.median(seconds)
        late += middle > limit_s
        print(
            f"{scenario}: {middle:.2f} CPU s, limit {limit_s:g}"
            f" ({min(seconds):.2f} to {max(seconds):.2f}, {runs} runs)"
        )
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
