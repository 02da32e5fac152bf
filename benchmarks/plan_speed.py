"""
CPU seconds of whole `sizing plan` commands, verifying simulations included.

    python benchmarks/plan_speed.py [--runs 5]

User and system seconds, median of the runs, beside the limit of each scenario; imports, catalogs
and every thread count. Exits with 1 if one takes longer. On a machine that others use too, CPU
seconds grow by what they take of caches and clock: each plan is also given in units of a fixed
numpy kernel, timed before every run, by which machines and days compare.
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


def cpu_s(scenario: str) -> float:
    """Plan once in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from sizing.cli import main; main()", "plan", scenario]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


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
    runs = parser.parse_args().runs
    print(f"{machine()}; simulation {'' if minicluster.COMPILED else 'not '}compiled (ADR 17)")
    late = 0
    for scenario, limit_s in LIMITS_S.items():
        pairs = [(kernel_s(), cpu_s(scenario)) for _ in range(runs)]
        seconds = [plan_s for _, plan_s in pairs]
        middle = statistics.median(seconds)
        ratio = statistics.median(plan_s / one_s for one_s, plan_s in pairs)
        late += middle > limit_s
        print(
            f"{scenario}: {middle:.2f} CPU s, limit {limit_s:g}"
            f" ({min(seconds):.2f} to {max(seconds):.2f}, {runs} runs), {ratio:.1f} kernels"
        )
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
