"""
A day in 20 minutes: `serving scale --auto` on simulated engines, beside what `sizing day` predicts.

    python benchmarks/day.py                          # about 22 minutes on 2 quiet cores

Plans a small scenario, deploys the plan with simulated engines, sends the rates of a shipped
profile, compressed, and lets `serving scale --auto` follow them. Prints the share of requests
within the SLO and the GPU-hours (of the day, not of the 20 minutes), predicted and measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from minicluster.plan import Plan, read_plan
from minicluster.plan.scaling import scaled_pools
from minicluster.workload.day_profile import DAY_S, DayProfile, read_profile
from serving.cluster.ports import free_ports
from sizing import catalog
from sizing.planner.studies.day import Day, DayOptions, day
from sizing.scenario import Scenario

BIN = Path(sys.executable).parent
SCENARIO = "llama-3.1-8b-h100"
KEYS = {
    "search.pools": "split",
    "search.tp": [1],
    "workload.output_tokens": 60,
    "workload.requests_per_s": 60.0,
}
SLOWDOWN = 10.0
WINDOW_S, HOLD_S, COLD_START_S = 10.0, 30.0, 8.0
"""Seconds of the clock; a simulated replica answers about 8 s after the decision for it."""

FORECAST_ERROR = 0.25
"""A window has about 50 requests: their number is off by 14 %, one standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Requests within every limit, and GPU-seconds of the clock, as measured."""

    attained_fraction: float
    gpu_seconds: float
    seconds: float
    changes: int


def main() -> None:
    """Print both days."""
    parser = argparse.ArgumentParser(description="A day in minutes, on simulated engines.")
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as made:
        place, inputs = Path(made), Scenario.load(SCENARIO, KEYS)
        profile = read_profile(
            catalog.find_profile("sine-day"), inputs.scenario.workload.requests_per_s
        )
        (place / "scenario.toml").write_text(inputs.to_toml(), encoding="utf-8")
        typed(place, "sizing", "plan", "scenario.toml", "-o", "plan.json")
        faster = DAY_S / (60 * minutes)
        predicted = day(inputs, profile, compressed(faster))
        measured = followed(place, profile, 60 * minutes)
    hours = measured.gpu_seconds / measured.seconds * 24
    row = "{:10} {:>12} {:>8} {:>14}".format
    print(row("", "GPU-hours", "fewer", "within SLO"))
    print(row("static", f"{predicted.static_gpu_hours:.1f}", "", ""))
    scaled, whole = predicted.scaled, predicted.static_gpu_hours
    for name, gpu_hours, share in (
        ("predicted", scaled.gpu_hours, scaled.attained_fraction),
        ("measured", hours, measured.attained_fraction),
    ):
        print(row(name, f"{gpu_hours:.1f}", f"{1 - gpu_hours / whole:.0%}", f"{share:.2%}"))
    print(f"changes: {changes(predicted)} predicted, {measured.changes} measured")


def compressed(faster: float) -> DayOptions:
    """Return the options of a day that lasts *faster* times as long as the run."""
    return DayOptions(
        cold_start_s=COLD_START_S * faster,
        forecast_error_fraction=FORECAST_ERROR,
        hold_s=HOLD_S * faster,
        interval_s=WINDOW_S * faster,
    )


def changes(found: Day) -> int:
    """Return how often the GPUs of the scaled day change."""
    gpus = found.scaled.gpus
    return sum(one != two for one, two in pairwise(gpus))


def followed(place: Path, profile: DayProfile, seconds: float) -> Run:
    """Deploy, send the day and follow it; return what came of it."""
    [port] = free_ports(1)
    plan = read_plan(place / "plan.json")
    engine = ("--engine", "simulated", "--slowdown", f"{SLOWDOWN:g}", "--port", str(port))
    try:
        typed(place, "serving", "up", "plan.json", *engine)
        auto = ("--auto", "--window", f"{WINDOW_S:g}", "--hold-seconds", f"{HOLD_S:g}")
        with subprocess.Popen(  # noqa: S603  (our own command)
            [BIN / "serving", "scale", *auto], cwd=place, stdout=subprocess.PIPE, text=True
        ) as scaling:
            seen: list[tuple[float, int]] = []
            reader = threading.Thread(target=read, args=(scaling, plan, seen))
            reader.start()
            started_s = time.monotonic()
            host = f"http://127.0.0.1:{port}"
            rates = ("--stages", stages(profile, seconds / SLOWDOWN), "--warmup", "0")
            load = ("loadtest", "run", "plan.json", "--host", host, *rates, "-o", "load")
            typed(place, *load, check=False)
            ended_s = time.monotonic()
            scaling.terminate()
            reader.join()
    finally:
        typed(place, "serving", "down", check=False)
    verdict = json.loads((place / "load" / "verdict.json").read_text(encoding="utf-8"))
    print(json.dumps(verdict["outcomes"]), verdict["reasons"], flush=True)
    full = sum(pool.gpus * pool.most for pool in scaled_pools(plan))
    return Run(
        # The tighter limit: how many requests miss both is not in the verdict.
        attained_fraction=min(each["attained_fraction"] for each in verdict["slo"]),
        gpu_seconds=integral(seen, full, started_s, ended_s),
        seconds=ended_s - started_s,
        changes=sum(one != two for (_, one), (_, two) in pairwise(seen)),
    )


def read(scaling: subprocess.Popen[str], plan: Plan, seen: list[tuple[float, int]]) -> None:
    """Keep the time and the GPUs of each decision that is printed."""
    gpus = {pool.role: pool.gpus for pool in scaled_pools(plan)}
    for line in scaling.stdout or ():
        print(f"{time.monotonic():.0f} {line}", end="", flush=True)
        _, found, numbers = line.strip().partition("replicas: ")
        if found and "requests/s" in line:
            pairs = (each.split() for each in numbers.split(", "))
            seen.append((time.monotonic(), sum(gpus[role] * int(n) for role, n in pairs)))


def integral(seen: list[tuple[float, int]], full: int, start_s: float, end_s: float) -> float:
    """Return GPU-seconds; a line comes after its change, so that the larger number counts."""
    total, before_s, before = 0.0, start_s, full
    for time_s, gpus in [*seen, (end_s, 0)]:
        until_s = min(max(time_s, start_s), end_s)
        total += (until_s - before_s) * max(before, gpus)
        before_s, before = until_s, gpus
    return total


def stages(profile: DayProfile, seconds: float) -> str:
    """Return the day's rates as ramps of the load test."""
    rates = [*profile.requests_per_s, profile.requests_per_s[0]]
    each_s = seconds / (len(rates) - 1)
    return ",".join(f"{one:.4f}-{two:.4f}x{each_s:.4f}" for one, two in pairwise(rates))


def typed(place: Path, *words: str, check: bool = True) -> None:
    """Run one of our commands in *place*."""
    print("$ " + " ".join(words), flush=True)
    command = [BIN / words[0], *words[1:]]
    subprocess.run(command, cwd=place, check=check)  # noqa: S603  (our own command)


if __name__ == "__main__":
    main()
