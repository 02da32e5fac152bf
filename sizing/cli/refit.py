"""`sizing calibrate --from samples.jsonl`: constants from load tests."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from minicluster.files import write_atomically
from minicluster.shell import talk
from sizing.evidence.refit.evidence import SOUND, check_runs
from sizing.evidence.refit.fit import RunResidual, fit_scales, recalibrated, residuals
from sizing.evidence.refit.observed import Observed, read_observed
from sizing.evidence.refit.scales import scaled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minicluster.plan import StepModel
    from sizing.evidence.refit.scales import Scales


def recalibrate(
    samples: Sequence[Path],
    *,
    held_out: Sequence[Path],
    plan: Path | None,
    out: Path,
    as_json: bool,
) -> None:
    """
    Fit the constants behind a run's plan to the run, and say what that does to the error.

    Args:
        samples: runs to fit to.
        held_out: runs to compare with only.
        plan: of all runs; `None`: each has its own beside its samples.
        out: calibration file; the residuals go beside it.
        as_json: print the residuals instead of a table.

    Raises:
        InputError: runs that cannot be read, or that no fit can stand on.
    """
    runs = [read_observed(path, plan) for path in samples]
    others = [read_observed(path, plan) for path in held_out]
    before = check_runs(runs, others)
    for run in (*runs, *others):
        _remark(run)
    model = runs[0].step_model
    scales = fit_scales(model, runs)
    found = {
        "fitted": residuals(model, scaled(model, scales), runs),
        "held_out": residuals(model, scaled(model, scales), others) or _left_out(model, runs),
    }
    fitted = recalibrated(before, scales, runs, name=out.stem)
    write_atomically(out, json.dumps(asdict(fitted), indent=2, sort_keys=True) + "\n")
    kept = {"scales": asdict(scales)} | {k: [asdict(r) for r in v] for k, v in found.items()}
    text = json.dumps(kept, indent=2) + "\n"
    write_atomically(out.with_suffix(".residuals.json"), text)
    if as_json:
        sys.stdout.write(text)
    else:
        _print(scales, found, out)


def _remark(run: Observed) -> None:
    """Say what of a run is left out, and what it is worth."""
    if run.turned_away:
        share = f"{run.turned_away:,} of {run.turned_away + len(run.arrivals):,} requests"
        away = f"{run.name}: left out {share}, turned away before an engine saw them"
        talk.print(away, highlight=False, markup=False, soft_wrap=True)
    if run.verdict is not None and run.verdict not in SOUND:
        worth = f"{run.name}: its verdict is {run.verdict}: errors on it prove little"
        talk.print(worth, highlight=False, markup=False, soft_wrap=True)


def _left_out(model: StepModel, runs: Sequence[Observed]) -> tuple[RunResidual, ...]:
    """Compare each run with a fit to the others; nothing if there is one alone."""
    if len(runs) == 1:
        return ()
    rows: list[RunResidual] = []
    for run in runs:
        scales = fit_scales(model, [other for other in runs if other is not run])
        rows += residuals(model, scaled(model, scales), [run])
    return tuple(rows)


def _print(scales: Scales, found: dict[str, tuple[RunResidual, ...]], out: Path) -> None:
    factors = ", ".join(f"{name} x {value:.2f}" for name, value in asdict(scales).items())
    talk.print(f"constants: {factors}", highlight=False)
    for kind, rows in found.items():
        if rows:
            talk.print(_table(kind.replace("_", " "), rows))
    if not found["held_out"]:
        talk.print("no run was held out: name others with --hold-out, or several --from")
    talk.print(f"written: {out}, residuals beside it", highlight=False, soft_wrap=True)


def _table(title: str, rows: Sequence[RunResidual]) -> Table:
    """Show the errors of a kind of runs: every statistic, mean size before and after."""
    names = sorted({row.run for row in rows})
    title = f"predicted / measured - 1, {title}: {len(names)} runs"
    table = Table(title=title, title_justify="left")
    for heading in ("", "before", "after", "mean size before", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    for metric, statistic in dict.fromkeys((row.metric, row.statistic) for row in rows):
        those = [row for row in rows if (row.metric, row.statistic) == (metric, statistic)]
        before = np.array([row.before_fraction for row in those])
        after = np.array([row.after_fraction for row in those])
        table.add_row(
            f"{metric.upper() if len(metric) == 4 else metric} {statistic}",  # noqa: PLR2004
            f"{before.mean():+.0%}",
            f"{after.mean():+.0%}",
            f"{np.abs(before).mean():.0%}",
            f"{np.abs(after).mean():.0%}",
        )
    return table
