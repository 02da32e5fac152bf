"""
CPU and wall seconds of whole `sizing plan` commands and studies, alone and with a job per core.

    python benchmarks/plan_speed.py [--runs 5] [--studies]

User and system seconds with one job, median of the runs, beside the limit of each scenario;
imports, catalogs and every thread count. Exits with 1 if one takes longer. On a machine that others
use too, CPU seconds grow by what they take of caches and clock: each plan is also given in units of
a fixed numpy kernel, timed before every run, by which machines and days compare. Wall seconds are
after start-up, which is the wall time of `sizing gpus`, and mean something on quiet cores only.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import minicluster

LIMITS_S = {"llama-3.1-70b-h100": 2.5, "deepseek-v3-h200": 4.0, "llama-3.1-70b-1024gpu": 15.0}
"""Time limit of each plan on two cores of an AMD EPYC without AVX-512."""

VECTOR_FLAGS = ("avx2", "avx512f")
"""Flags of a CPU that say how wide numpy computes."""

KERNEL_VALUES, KERNEL_ROUNDS = 1 << 16, 40
"""Values that the kernel sorts and adds up, and how often: about a tenth of a second."""


STUDIES = (("decisions", "llama-3.1-70b-h100"), ("split-map", "llama-3.1-70b-h100"))
"""Studies that are timed with one job and with one per core."""


def seconds(*arguments: str) -> tuple[float, float]:
    """Return CPU and wall seconds of a command in a process of its own, workers included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", "from sizing.cli import main; main()", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall_s


def wall_line(command: str, scenario: str, start_up_s: float, runs: int) -> str:
    """Return the wall seconds after start-up and CPU seconds, with one job and one per core."""
    parts = []
    for options in (("--jobs", "1"), ()):
        pairs = [seconds(command, scenario, *options) for _ in range(runs)]
        cpu_s, wall_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        jobs = " ".join(options) or "a job per core"
        parts.append(f"{wall_s - start_up_s:.2f} s wall, {cpu_s:.2f} CPU s ({jobs})")
    return f"{command} {scenario}: " + "; ".join(parts)


def kernel_s() -> float:
    """CPU seconds of the kernel: exponentials, sorts and sums of the same numbers."""
    values = np.random.default_rng(0).random(KERNEL_VALUES)
    start = time.process_time()
    for _ in range(KERNEL_ROUNDS):
        np.cumsum(np.sort(np.exp(-values)))
    return time.process_time() - start


def machine() -> str:
    """Return the CPU's model and which vector instructions it has."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    keys = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    found = {key.strip(): value.strip() for key, value in keys.items()}
    flags = found.get("flags", "").split()
    has = ", ".join(f"{flag} {'yes' if flag in flags else 'no'}" for flag in VECTOR_FLAGS)
    return f"{found.get('model name', 'CPU of unknown name')}: {has}"


def main() -> int:
    """Print the machine and a line a scenario."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--studies", action="store_true", help="also decisions and split-map")
    options = parser.parse_args()
    runs = options.runs
    print(f"{machine()}; simulation {'' if minicluster.COMPILED else 'not '}compiled (ADR 17)")
    late = 0
    for scenario, limit_s in LIMITS_S.items():
        pairs = [(kernel_s(), seconds("plan", scenario, "--jobs", "1")[0]) for _ in range(runs)]
        all_s = [plan_s for _, plan_s in pairs]
        middle = statistics.median(all_s)
        ratio = statistics.median(plan_s / one_s for one_s, plan_s in pairs)
        late += middle > limit_s
        print(
            f"{scenario}: {middle:.2f} CPU s, limit {limit_s:g}"
            f" ({min(all_s):.2f} to {max(all_s):.2f}, {runs} runs), {ratio:.1f} kernels"
        )
    start_up_s = statistics.median(seconds("gpus")[1] for _ in range(runs))
    print(f"start-up: {start_up_s:.2f} s wall (sizing gpus)")
    plans = [("plan", scenario) for scenario in LIMITS_S]
    for command, scenario in (*plans, *(STUDIES if options.studies else ())):
        print(wall_line(command, scenario, start_up_s, runs if command == "plan" else 1))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
