"""A run judged, and everything that says so written beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.report.junit import to_junit
from loadtest.report.page import page
from loadtest.run.folder import PLAN, Run, read_run
from loadtest.verdict.goodput_curve import Foreseen, foresee
from loadtest.verdict.resimulation import Resimulation, let_in, replay
from loadtest.verdict.verdict import Verdict, conclude, to_json
from minicluster import shell
from minicluster.errors import InputError, MiniclusterError
from minicluster.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """
    On which terms a run is judged.

    Attributes:
        tolerance: by metric, the error of the predicted mean that is allowed.
        require_prediction: a larger one is a miss.
        junit: file for JUnit XML.
        replay: whether the prediction is made again for the run's own requests.
        foresee: whether it is made for other loads, too, for the report.
    """

    tolerance: dict[str, float]
    require_prediction: bool = False
    junit: Path | None = None
    replay: bool = True
    foresee: bool = True


def publish(folder: Path, terms: JudgeOptions) -> Verdict:
    """
    Judge the run in *folder*; write `verdict.json`, `report.html` and JUnit XML.

    Raises:
        InputError: what lies there is no run, or a file cannot be written.
    """
    run = read_run(folder)
    if run.plan and run.plan.model.id != run.job.model:
        raise InputError(
            f"{folder / PLAN}: model.id", run.plan.model.id, f"{run.job.model}, which was loaded"
        )
    foretold = _replayed(folder, run) if terms.replay else None
    verdict = conclude(
        run, terms.tolerance, require_prediction=terms.require_prediction, replay=foretold
    )
    if foretold:
        verdict = replace(verdict, notes=(*verdict.notes, *_left_out(run)))
    curve = _foreseen(folder, run, foretold, verdict) if foretold and terms.foresee else None
    files = {
        folder / "verdict.json": to_json(verdict),
        folder / "report.html": page(run, verdict, foretold, curve),
    }
    if terms.junit:
        files[terms.junit] = to_junit(verdict, require_prediction=terms.require_prediction)
    for path, text in files.items():
        write_atomically(path, text)
    return verdict


def _replayed(folder: Path, run: Run) -> Resimulation | None:
    """Simulate what was sent; where that cannot be, say so and go on without."""
    if run.plan is None or not any(s.ok for s in run.samples):
        return None
    try:
        return replay(folder / PLAN, let_in(run.samples), schedule=run.schedule)
    except MiniclusterError as error:
        _say(f"the prediction is the plan's own, not made for these requests: {error}")
        return None


def _left_out(run: Run) -> tuple[str, ...]:
    """Say how many requests the prediction was made without, if any."""
    sent = len(run.samples)
    num = sent - len(let_in(run.samples))
    if not num:
        return ()
    share = f"{num:,} of {sent:,} requests sent ({num / sent:.0%})"
    return (f"{share} were turned away before an engine saw them; the prediction is of the others",)


def _foreseen(folder: Path, run: Run, own: Resimulation, verdict: Verdict) -> Foreseen | None:
    """Simulate other loads; a closed loop has none of its own, nor has one that changes."""
    offered = verdict.throughput.offered_requests_per_s
    if run.plan is None or run.job.shape.closed or run.job.shape.stages or not offered:
        return None
    limit = run.plan.headroom.load_factor * run.plan.workload.requests_per_s
    try:
        return foresee(
            folder / PLAN, run, own, offered_requests_per_s=offered, limit_requests_per_s=limit
        )
    except MiniclusterError as error:
        _say(f"no goodput at other loads in the report: {error}")
        return None


def _say(text: str) -> None:
    shell.talk.print(text, highlight=False, markup=False, soft_wrap=True)
