"""
`make demo` repeatedly, on a quiet machine and beside busy loops: exit codes, times and errors.

    python benchmarks/demo_runs.py [--quiet 5] [--busy 5] [--write]

Half of the busy runs have one loop, half one for each core, in sessions of their own. A run counts
if its exit code is 0, 3 or 4, a verdict lies in out/demo, and no process of it is left. `--write`
keeps the rows in tests/published/demo_repeats.toml, from which `make docs` makes the table of
docs/validation.md. Nothing else should run meanwhile. Exit code 1 if a run does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from minicluster.machine import processor
from serving.cluster.processes import cluster_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

OUT = Path("out/demo")
ROWS = Path(__file__).parents[1] / "tests" / "published" / "demo_repeats.toml"
MARK = "MINICLUSTER_DEMO_RUN"
ENDINGS = (0, 3, 4)
LIMIT_S = 1800.0
"""Limit of one run. It is far more than a run takes, so that only a run that hangs is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """
    One run of the demo.

    Attributes:
        loops: busy loops beside it.
        others_fraction: share of the cores that other processes took, loops included.
        left: processes of it that were there afterwards.
        first, second: error of the predicted means of each load, by metric.
        first_s, second_s: the measured means.
        requests: judged, of each load.
        reasons: that the verdict of the first load gives.
    """

    loops: int
    seconds: float
    exit_code: int
    verdict: str
    others_fraction: float
    left: int
    first: dict[str, float]
    second: dict[str, float]
    first_s: dict[str, float]
    second_s: dict[str, float]
    requests: tuple[int, int]
    reasons: tuple[str, ...]

    @property
    def counts(self) -> bool:
        """The run ended with an allowed exit code and a verdict, and left no process."""
        return self.exit_code in ENDINGS and bool(self.verdict) and not self.left


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep *number* cores busy for the duration of the block."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop, start_new_session=True) for _ in range(number)]  # noqa: S603
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def demo(loops: int) -> DemoRun:
    """Run the demo once, beside *loops* busy loops."""
    mark = secrets.token_hex(8)
    with busy_loops(loops):
        started = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "scripts/demo.py"],
            env={**os.environ, MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.wait()
        seconds = time.monotonic() - started
    first, second = (_read(folder / "verdict.json") for folder in (OUT, OUT / "again"))
    return DemoRun(
        loops=loops,
        seconds=round(seconds),
        exit_code=child.returncode,
        verdict=str(first.get("verdict", "")),
        others_fraction=float(_read(OUT / "demo.json").get("others_fraction", 0.0)),
        left=len(cluster_processes(mark, MARK)),
        first=_means(first, "error_fraction"),
        second=_means(second, "error_fraction"),
        first_s=_means(first, "measured_s"),
        second_s=_means(second, "measured_s"),
        requests=(_requests(first), _requests(second)),
        reasons=tuple(first.get("reasons", ())),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    return found


def _means(verdict: dict[str, Any], name: str) -> dict[str, float]:
    rows = (verdict.get("comparison") or {}).get("rows", [])
    return {
        row["metric"]: round(row[name], 4)
        for row in rows
        if row["statistic"] == "mean" and row["metric"] in {"ttft", "tpot"}
    }


def _requests(verdict: dict[str, Any]) -> int:
    return sum(verdict.get("outcomes", {}).values())


def main() -> int:
    """Run all, print a line each and the medians of the quiet ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quiet", type=int, default=5, help="runs without loops")
    parser.add_argument("--busy", type=int, default=5, help="runs beside loops")
    parser.add_argument("--write", action="store_true", help=f"keep the rows in {ROWS.name}")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    order = [0] * asked.quiet + [(1, cores)[number % 2] for number in range(asked.busy)]
    runs = []
    for loops in order:
        runs.append(demo(loops))
        print(line(runs[-1]), flush=True)
        if asked.write:
            write(runs, cores)
    quiet = [run for run in runs if not run.loops and run.first and run.second]
    for which in ("first", "second") if quiet else ():
        for metric in ("ttft", "tpot"):
            errors = [abs(getattr(run, which)[metric]) for run in quiet]
            print(
                f"{which} load, {metric.upper()} mean: median error "
                f"{median(errors):.1%}, largest {max(errors):.1%}"
            )
    return 0 if all(run.counts for run in runs) else 1


def line(run: DemoRun) -> str:
    """Return a run as one line."""
    errors = "; ".join(
        ", ".join(f"{metric.upper()} {error:+.0%}" for metric, error in each.items()) or "none"
        for each in (run.first, run.second)
    )
    return (
        f"{run.loops} loops: exit {run.exit_code} ({run.verdict or 'no verdict'}) "
        f"after {run.seconds:.0f} s, others {run.others_fraction:.0%}, "
        f"judged {run.requests}, left {run.left}, errors {errors}"
        + "".join(f"; {reason}" for reason in run.reasons)
    )


def write(runs: list[DemoRun], cores: int) -> None:
    """Keep the rows as TOML."""
    lines = [
        "# Written by benchmarks/demo_runs.py --write; errors: predicted / measured - 1 of means.",
        f'machine = "{cores} cores of an {processor()}, {platform.system()} {platform.release()}"',
        f'date = "{datetime.now(UTC).date().isoformat()}"',
        "notes = []",
    ]
    for run in runs:
        lines += ["", "[[runs]]"]
        for name, value in asdict(run).items():
            lines.append(f"{name} = {_toml(value)}")
    ROWS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {each}" for key, each in value.items()) + " }"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


if __name__ == "__main__":
    sys.exit(main())
