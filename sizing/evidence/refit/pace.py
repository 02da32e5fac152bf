"""A load simulated at the pace that the engines had, as it changed meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sizing.evidence.refit.engine_steps import FEWEST, modelled_s, paces, timed_steps
from sizing.evidence.refit.fit import at_pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from minicluster.plan import StepModel
    from minicluster.workload.engine_steps import EngineSteps
    from sizing.evidence.refit.engine_steps import TimedSteps
    from sizing.simulation.outcome import Outcome

PART_S = 5.0
"""Length of the parts of a load whose pace is told apart: many requests long, and many steps."""

PACES = 5
"""Paces at most: parts that were about as fast are simulated together."""

PICKED = ("ttft_s", "tpot_s", "e2e_s", "stall_s")


def simulated_at_pace(
    model: StepModel,
    kept: EngineSteps | None,
    run: Callable[[StepModel], Outcome],
) -> Outcome:
    """
    Simulate a load at the pace of each part of it (docs/model.md, eq. C6).

    Parts of `PART_S` are put into at most `PACES` groups of about equal pace. The whole load is
    simulated at the pace of each group, and each request has its latencies of the group in which
    it was due. Everything else is that of the simulation at the mean pace.

    Args:
        model: of the plan.
        kept: what the engines ran; its start is that of the load's arrivals. `None`: the load is
            simulated at the pace of the plan.
        run: simulates the load with a model.

    Ignores:
        What a request meets of another group's queue; a part is as long as a dozen requests.
    """
    if kept is None:
        return run(model)
    steps, start_unix_s = timed_steps(kept), kept.start_unix_s
    mean = run(at_pace(model, paces(model, steps)))
    due_in = np.floor(mean.due_s / PART_S).astype(int)
    picked = {name: getattr(mean, name).copy() for name in PICKED}
    parts_s = {name: column.copy() for name, column in mean.parts_s.items()}
    for group in _groups(model, steps, start_unix_s):
        own = {
            role: timed.among(np.isin(_part_of(timed, start_unix_s), group))
            for role, timed in steps.items()
        }
        at_own = run(at_pace(model, paces(model, own)))
        chosen = np.isin(due_in, group)
        for name, column in picked.items():
            column[chosen] = getattr(at_own, name)[chosen]
        for name, column in parts_s.items():
            column[chosen] = at_own.parts_s[name][chosen]
    return replace(mean, parts_s=parts_s, **picked)


def _groups(
    model: StepModel, steps: Mapping[str, TimedSteps], start_unix_s: float
) -> list[NDArray[np.int64]]:
    """Return the parts of a load, by number, in groups of about equal pace."""
    logs: dict[int, list[float]] = {}
    for role, timed in steps.items():
        part, modelled = _part_of(timed, start_unix_s), modelled_s(model, role, timed)
        for number in np.unique(part):
            inside = part == number
            if inside.sum() >= FEWEST:
                factor = timed.seconds[inside].sum() / modelled[inside].sum()
                logs.setdefault(int(number), []).append(float(np.log(factor)))
    numbers = np.array(sorted(logs, key=lambda number: float(np.mean(logs[number]))), dtype=int)
    return [group for group in np.array_split(numbers, PACES) if len(group)]


def _part_of(timed: TimedSteps, start_unix_s: float) -> NDArray[np.int64]:
    """Return the number of the part of the load in which each step began, shape (steps,)."""
    return np.floor((timed.begin_s - start_unix_s) / PART_S).astype(np.int64)
