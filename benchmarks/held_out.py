"""
Predictions of loads that no constant was fitted on, before and after recalibration.

On this machine's cores: time the engine, deploy the demo's plan, load it with two loads to
recalibrate and five others (rates and lengths), in rounds: a machine's pace drifts within minutes,
and what is fitted should have met as much of that as what is held out. Prints
predicted / measured - 1 of mean TPOT, mean TTFT and p99 TTFT, with the spread of the two
measurements beside it.
`python benchmarks/held_out.py [FOLDER] [REQUESTS]`; what FOLDER holds already is not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
SCENARIO = "laptop"
PORT = 18733
HOST = f"http://127.0.0.1:{PORT}"
REPEATS = 2
FITTED_REQUESTS = 400
CONTEXT_TOKENS = 192
"""Context of every plan: each deployment has to accept the longest request of all loads."""
SHOWN = (("tpot", "mean"), ("ttft", "mean"), ("ttft", "p99"))
AIMS = {("tpot", "mean"): 0.10, ("ttft", "mean"): 0.15, ("ttft", "p99"): 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load: a fraction of the predicted capacity, and ranges of lengths."""

    name: str
    utilisation: float
    inputs: tuple[int, int]
    outputs: tuple[int, int]

    @property
    def runs(self) -> list[str]:
        """Names of its runs, one in each round."""
        return [f"{self.name} {k + 1}" for k in range(REPEATS)]

    def settings(self, rate: float) -> list[str]:
        """Return it as `--set` options."""
        (a, b), (c, d) = self.inputs, self.outputs
        return [
            "--set", f"workload.requests_per_s={rate:.2f}",
            "--set", f"model.max_context_tokens={CONTEXT_TOKENS}",
            "--set", f"workload.input_tokens={{distribution='uniform', low={a}, high={b}}}",
            "--set", f"workload.output_tokens={{distribution='uniform', low={c}, high={d}}}",
        ]  # fmt: skip


FITTED = (
    Load(name="fit-1", utilisation=0.50, inputs=(56, 112), outputs=(6, 14)),
    Load(name="fit-2", utilisation=0.35, inputs=(96, 160), outputs=(8, 12)),
)
HELD_OUT = (
    Load(name="short", utilisation=0.45, inputs=(32, 64), outputs=(4, 8)),
    Load(name="longer answers", utilisation=0.40, inputs=(48, 80), outputs=(12, 20)),
    Load(name="longer prompts", utilisation=0.45, inputs=(80, 128), outputs=(4, 10)),
    Load(name="busier", utilisation=0.58, inputs=(48, 96), outputs=(5, 10)),
    Load(name="quieter", utilisation=0.35, inputs=(40, 88), outputs=(6, 12)),
)


def main(folder: Path, requests: int) -> None:
    """Measure what is missing, then print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = [(load, requests) for load in HELD_OUT]
    one_round = [(FITTED[0], FITTED_REQUESTS), *held_out, (FITTED[1], FITTED_REQUESTS)]
    runs = [(load, load.runs[k], count) for k in range(REPEATS) for load, count in one_round]
    missing = [run for run in runs if not (folder / run[1] / "verdict.json").exists()]
    if missing:
        calibration = folder / "calibration.json"
        command("serving", "demo-model", ".minicluster/models/demo")
        command("sizing", "calibrate", SCENARIO, "--engine", "-o", calibration)
        try:
            command("serving", "up", plan(folder, FITTED[0], "deployed"), "--port", PORT)
            for seed, (load, name, count) in enumerate(missing, start=1):
                options = ["--host", HOST, "--requests", count, "--seed", seed]
                order = plan(folder, load, name)
                command("loadtest", "run", order, *options, "-o", folder / name, may_end=(0, 3, 4))
        finally:
            command("serving", "down", may_end=(0, 1, 2, 3, 4, 5))
    show(folder)


def plan(folder: Path, load: Load, name: str) -> Path:
    """Make the plan of one load."""
    path = folder / f"{name}.plan.json"
    given = ("--calibration", folder / "calibration.json")
    command("sizing", "plan", SCENARIO, *given, *load.settings(1.0), "-o", path)
    capacity = json.loads(path.read_text())["prediction"]["capacity_requests_per_s"]
    rate = load.utilisation * capacity
    command("sizing", "plan", SCENARIO, *given, *load.settings(rate), "-o", path)
    return path


def show(folder: Path) -> None:
    """Recalibrate, and print errors on the loads held out."""
    options: list[object] = []
    for option, loads in (("--from", FITTED), ("--hold-out", HELD_OUT)):
        for name in (name for load in loads for name in load.runs):
            if (folder / name / "verdict.json").exists():
                options += [option, folder / name / "samples.jsonl"]
    command("sizing", "calibrate", *options, "-o", folder / "recalibrated.json")
    found = json.loads((folder / "recalibrated.residuals.json").read_text())
    rows = {(Path(r["run"]).parent.name, r["metric"], r["statistic"]): r for r in found["held_out"]}
    print("factors:", ", ".join(f"{k} {v:.2f}" for k, v in found["scales"].items()))
    for metric, statistic in SHOWN:
        print(f"\n{metric.upper()} {statistic}, aim {AIMS[metric, statistic]:.0%}")
        print(f"{'load':16}  {'measured, ms':>15}  spread  before   after")
        for load in HELD_OUT:
            wanted = [(name, metric, statistic) for name in load.runs]
            those = [rows[each] for each in wanted if each in rows]
            if those:
                print(line(load.name, those))


def line(name: str, rows: list[dict[str, Any]]) -> str:
    """Return one load: its measurements, their spread, and the error of their mean."""
    seen = [row["measured_s"] for row in rows]
    middle = sum(seen) / len(seen)
    before, after = (
        sum(row["measured_s"] * (1 + row[f"{which}_fraction"]) for row in rows) / len(rows) / middle
        - 1
        for which in ("before", "after")
    )
    values = " ".join(f"{1000 * value:7.1f}" for value in seen)
    spread = (max(seen) - min(seen)) / middle
    return f"{name:16}  {values:>15}  {spread:6.0%}  {before:+6.0%}  {after:+6.0%}"


def command(*parts: object, may_end: tuple[int, ...] = (0,)) -> None:
    """Run one of our commands, its table not shown."""
    line = [str(BIN / str(parts[0])), *map(str, parts[1:])]
    done = subprocess.run(line, check=False, stdout=subprocess.DEVNULL)  # noqa: S603
    if done.returncode not in may_end:
        raise SystemExit(f"`{' '.join(line)}` ended with exit code {done.returncode}")


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("out/held-out")
    main(where, int(sys.argv[2]) if len(sys.argv) > 2 else 1000)  # noqa: PLR2004
