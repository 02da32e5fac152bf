"""
`make demo` again and again: seconds by phase, verdict, errors as predicted and at pace.

    python benchmarks/demo_runs.py 10                # quiet: nothing else may run on the machine
    python benchmarks/demo_runs.py 3 --loops 1       # beside one process that only computes
    python benchmarks/demo_runs.py 10 --write tests/published/demo_repeats.toml

Four minutes a run. Each run is a row, none is left out; `--write` adds the rows to a file that
`make docs` puts into docs/evidence/demo.md. `--repeat N` sends the requests of the last run's first
load N times more to its engines: how far the machine is from itself, which no prediction can beat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.machine import processor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUT = Path("out/demo")
BIN = Path(sys.executable).parent
LIMIT_S = 900.0
ROWS = (("ttft", "mean"), ("ttft", "p90"), ("tpot", "mean"), ("tpot", "p90"))


def main() -> None:
    """Run the demos, print a line each, and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("runs", type=int)
    parser.add_argument("--loops", type=int, default=0, help="processes that only compute")
    parser.add_argument("--repeat", type=int, default=0, help="first load sent so many times more")
    parser.add_argument("--write", type=Path, help="file to add the rows to")
    given = parser.parse_args()
    for number in range(given.runs):
        last = number == given.runs - 1
        row = run_demo(given.loops, keep=last and given.repeat > 0)
        print(line(number + 1, row), flush=True)
        if given.write:
            add(given.write, row)
    if given.repeat:
        seen = repeated(given.repeat)
        print(f"mean TTFT of the same requests again: {seen} ms", flush=True)
        print(f"standard deviation {statistics.stdev(seen) / statistics.mean(seen):.0%}")
        subprocess.run([BIN / "serving", "down"], check=True)  # noqa: S603  (ours)


def run_demo(loops: int, *, keep: bool) -> dict[str, Any]:
    """Run `make demo` beside *loops* busy processes; return its row."""
    start_s = time.monotonic()
    with busy(loops):
        environment = os.environ | ({"KEEP": "1"} if keep else {})
        subprocess.run(
            ["make", "-s", "demo"],  # noqa: S607  (as a user does)
            check=False,
            capture_output=True,
            timeout=LIMIT_S,
            env=environment,
        )
    ended = json.loads((OUT / "demo.json").read_text(encoding="utf-8"))
    row: dict[str, Any] = {
        "loops": loops,
        "seconds": round(time.monotonic() - start_s),
        "exit_code": ended["exit_code"],  # make exits with 2 for every failure
        "others_fraction": ended["others_fraction"],
        "phases": ended["seconds"],
    }
    for name, folder in (("first", OUT), ("second", OUT / "again")):
        with suppress(OSError):
            verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
            row[name] = load_row(verdict)
    return row


def load_row(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of one load."""
    compared = verdict.get("comparison") or {"rows": [], "pace": {}}
    rows = {(each["metric"], each["statistic"]): each for each in compared["rows"]}
    kept = {
        f"{metric}_{statistic}": {
            "measured_s": rows[metric, statistic]["measured_s"],
            "error": rows[metric, statistic]["error_fraction"],
            "at_pace": rows[metric, statistic]["error_at_pace_fraction"],
        }
        for metric, statistic in ROWS
        if (metric, statistic) in rows
    }
    return {
        "verdict": verdict["verdict"],
        "reasons": verdict["reasons"],
        "requests": sum(verdict.get("outcomes", {}).values()),
        "design_effects": [each["design_effect"] for each in verdict.get("slo", [])],
        "pace": compared["pace"],
        **kept,
    }


def line(number: int, row: dict[str, Any]) -> str:
    """Return a run as a line: seconds, exit code, and for each load errors raw / at pace."""
    text = f"{number:2} loops {row['loops']} {row['seconds']:4} s exit {row['exit_code']}"
    text += f" others {row['others_fraction']:.0%}"
    for name in ("first", "second"):
        load = row.get(name)
        if load is None:
            continue
        errors = ", ".join(
            f"{load[key]['error']:+.0%}/{load[key]['at_pace'] or 0:+.0%}"
            for key in (f"{metric}_{statistic}" for metric, statistic in ROWS)
            if key in load
        )
        pace = " ".join(f"{role[0]}{factor:.2f}" for role, factor in load["pace"].items())
        text += f" | {load['verdict']} {load['requests']} {errors} pace {pace}"
    return text


def repeated(times: int) -> Sequence[float]:
    """Send the first load again to the engines that are up; return each mean TTFT in ms."""
    seen = []
    host = json.loads(Path(".minicluster/serving/state.json").read_text())["base_url"]
    plan, requests = OUT / "plan.json", json.loads((OUT / "verdict.json").read_text())["outcomes"]
    for number in range(times):
        folder = OUT / f"repeat-{number}"
        options = ("--host", host, "--requests", sum(requests.values()), "--seed", 0, "-o", folder)
        command = [BIN / "loadtest", "run", plan, *map(str, options)]
        subprocess.run(command, check=False, capture_output=True)  # noqa: S603  (ours)
        verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
        seen.append(round(1e3 * verdict["latency"]["ttft"]["mean_s"], 1))
    return seen


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep processes computing."""
    code = "while True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-c", code])  # noqa: S603  (ours)
        for _ in range(loops)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def add(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a TOML file, which names machine and date in its first lines."""
    if not path.exists():
        head = {
            "machine": f"{os.cpu_count()} cores of an {processor()}, Linux {platform.release()}",
            "date": datetime.now(UTC).date().isoformat(),
            "notes": [],
        }
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in head.items()))
    with path.open("a", encoding="utf-8") as file:
        file.write("\n[[runs]]\n")
        file.writelines(f"{key} = {toml(value)}\n" for key, value in row.items())


def toml(value: object) -> str:
    """Return a value as TOML: JSON, but for tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + " }"
    return json.dumps(round(value, 4) if isinstance(value, float) else value)


if __name__ == "__main__":
    main()
