"""Judge a run, and write its verdict and report beside the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.report.junit import to_junit
from loadtest.report.llm_d import to_llm_d
from loadtest.report.run_page import run_page
from loadtest.run.folder import PLAN, Run, as_json, read_run
from loadtest.verdict.resimulation import Resimulation, resimulate
from loadtest.verdict.verdict import Verdict, conclude
from minicluster import shell
from minicluster.errors import InputError, MiniclusterError
from minicluster.files import write_atomically
from minicluster.pages.write import write_page
from minicluster.workload.engine_steps import ENGINE_STEPS, read_engine_steps

if TYPE_CHECKING:
    from pathlib import Path


def judge_run(
    folder: Path,
    tolerance: dict[str, float],
    *,
    require_prediction: bool = False,
    junit: Path | None = None,
) -> Verdict:
    """
    Judge the run in *folder*; write `verdict.json`, `llm-d.json`, `report.html` and JUnit XML.

    Args:
        tolerance: largest error, by metric, of a predicted mean that counts as correct.
        require_prediction: whether a larger error is a miss.
        junit: file for the verdict as JUnit XML; `None`: not written.

    Raises InputError: *folder* contains no run, or a file cannot be written.
    """
    run = read_run(folder)
    if run.plan and run.plan.model.id != run.job.model:
        raise InputError(
            f"{folder / PLAN}: model.id",
            run.plan.model.id,
            f"{run.job.model}, the model that was loaded",
        )
    resimulation = _resimulate(folder, run)
    judged = conclude(
        run, tolerance, require_prediction=require_prediction, resimulation=resimulation
    )
    verdict = judged.verdict
    write_atomically(folder / "verdict.json", as_json(verdict))
    write_atomically(folder / "llm-d.json", to_llm_d(judged))
    if junit:
        write_atomically(junit, to_junit(verdict, require_prediction=require_prediction))
    write_page(folder / "report.html", run_page(judged))
    return verdict


def _resimulate(folder: Path, run: Run) -> Resimulation | None:
    """Simulate the requests that were sent; if that fails, print why and return `None`."""
    if run.plan is None or not any(s.ok for s in run.samples):
        return None
    try:
        steps = folder / ENGINE_STEPS
        reported = steps if read_engine_steps(steps) else None
        plain = run.job.plain
        return resimulate(folder / PLAN, run.samples, run.schedule, reported, plain=plain)
    except MiniclusterError as error:
        shell.say(f"the prediction is the plan's own, not one for these requests: {error}")
        return None
