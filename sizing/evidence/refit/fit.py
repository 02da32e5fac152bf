"""Factors on a calibration's constants, from how far replayed runs are from measured ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from minicluster.phases import INGRESS, phase_s
from minicluster.stats.quantiles import quantile
from minicluster.stats.shares import LEVELS
from sizing.evidence.refit.engine_steps import step_gaps
from sizing.evidence.refit.observed import FEWEST, PHASES, Observed
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.planned import deployed_system

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from minicluster.plan import StepModel
    from minicluster.specs.calibration import CalibrationSpec
    from sizing.evidence.refit.engine_steps import Pace

STATISTICS = {
    ("ttft", "mean"): 0.06,
    ("ttft", "p50"): 0.08,
    ("ttft", "p90"): 0.10,
    ("ttft", "p99"): 0.20,
    ("tpot", "mean"): 0.04,
    ("tpot", "p90"): 0.08,
}
"""Statistics compared, with the standard deviation of their logarithms between runs of one load."""

Scaled = TypeVar("Scaled", "StepModel", "CalibrationSpec")

STEPS_SD = 0.03
"""Likewise of the seconds of the engines' steps, summed: hundreds of them are in each sum."""

PHASE_SD = 0.08
BOUND = 2.0
STEP = 0.05
ROUNDS = 5
SEED = 0


@dataclass(frozen=True, slots=True)
class Scales:
    """
    Factors on constants, one for each group that a run can distinguish; 1 leaves them.

    Attributes:
        prefill_beside: on what decode adds to prefill steps (f_p, g_p, h_p of eq. Q9).
        decode_beside: on what prefill adds to decode steps (f_d, h_d).
        request: on what a request takes outside the engines.
        transfer: on the KV pull.
    """

    prefill: float = 1.0
    decode: float = 1.0
    prefill_beside: float = 1.0
    decode_beside: float = 1.0
    request: float = 1.0
    transfer: float = 1.0


PRIOR = np.array([0.15, 0.15, 0.6, 0.6, 0.6, 0.4])
"""Standard deviation of the logarithm of each of `Scales` before anything is measured: steps timed
alone are well known, how pools disturb one another under load is not."""


def scaled(constants: Scaled, scales: Scales) -> Scaled:
    """Return a step model or a calibration with its constants times *scales*."""
    return replace(
        constants,
        prefill=constants.prefill.scaled(scales.prefill),
        decode=constants.decode.scaled(scales.decode),
        path=constants.path.scaled(request=scales.request, transfer=scales.transfer),
        interference=constants.interference.scaled(
            prefill=scales.prefill_beside, decode=scales.decode_beside
        ),
    )


def with_ingress_of(before: CalibrationSpec, run: Observed) -> CalibrationSpec:
    """
    Return the constants with the ingress of a run: a constant, and an exponential part beyond it.

    The mean and the lowest tenth decide both (docs/model.md, eq. C7); without `Server-Timing` the
    constants stay.
    """
    ingress_s = run.phases_s[INGRESS][run.counts]
    ingress_s = ingress_s[np.isfinite(ingress_s)]
    if len(ingress_s) < FEWEST:
        return before
    mean_s, low_s = float(ingress_s.mean()), float(np.quantile(ingress_s, 0.1))
    spread_s = max(0.0, (mean_s - low_s) / (1 + math.log(0.9)))
    constant_s = max(0.0, mean_s - spread_s)
    path = replace(before.path, request_s=constant_s, request_spread_s=spread_s)
    return replace(before, path=path)


def at_pace(model: StepModel, found: Mapping[str, Pace]) -> StepModel:
    """
    Return *model* with the steps of each pool as fast as they were in a load.

    What lies between the pools (request, KV pull) is work of the same machine, and takes the
    geometric mean of the pools' paces.
    """
    factors = {role: pace.factor for role, pace in found.items()}
    between = float(np.exp(np.mean(np.log([*factors.values()] or [1.0]))))
    return scaled(
        model,
        Scales(
            prefill=factors.get("prefill", 1.0),
            decode=factors.get("decode", factors.get("mixed", 1.0)),
            request=between,
            transfer=between,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResidual:
    """One statistic of one run: predicted / measured - 1 before and after."""

    run: str
    metric: str
    statistic: str
    measured_s: float
    before_fraction: float
    after_fraction: float


def fit_scales(model: StepModel, runs: Sequence[Observed]) -> Scales:
    """
    Fit the factors that make *model* explain *runs* best.

        least sum ((ln predicted - ln measured) / s)^2 + sum (ln factor / prior)^2

    Each run's own requests pass through the simulation (docs/model.md, eq. C4). Runs of one load
    differ by s however long they are, so that ten statistics of one run never outweigh the prior
    as ten runs do; what runs cannot tell stays where it was. Where the engines reported their
    steps, the sums of their seconds are compared too: they tell steps from what lies between.

    Source:
        Maximum a posteriori by Gauss and Newton, differences by central steps of 5 %. Beyond
        `BOUND` standard deviations a gap counts linearly (Huber, 1964): what the model has no
        constant for must not bend the others.
    """
    found = np.zeros(len(PRIOR))
    sds = np.array([sd for run in runs for sd in _sds(run)])
    best = _cost(gaps := _gaps(model, runs, found), found, sds)
    for _ in range(ROUNDS):
        slopes = _slopes(model, runs, found)
        weights = np.sqrt(np.minimum(1.0, BOUND / np.maximum(np.abs(gaps / sds), 1e-12))) / sds
        rows = np.vstack([slopes * weights[:, None], np.diag(1 / PRIOR)])
        aims = np.concatenate([-gaps * weights, -found / PRIOR])
        step = np.linalg.lstsq(rows, aims, rcond=None)[0]
        for shorter in (1.0, 0.5, 0.25):
            tried = found + shorter * step
            seen = _gaps(model, runs, tried)
            cost = _cost(seen, tried, sds)
            if cost < best:
                break
        else:
            break
        gained, best, found, gaps = best - cost, cost, tried, seen
        if gained < 1e-3 * best:
            break
    return _factors(found)


def recalibrated(
    before: CalibrationSpec, scales: Scales, runs: Sequence[Observed], *, name: str
) -> CalibrationSpec:
    """Return the constants times the factors that *runs* gave, under a new name."""
    return replace(
        scaled(before, scales),
        name=name,
        date=datetime.now(tz=UTC).date().isoformat(),
        num_rows=before.num_rows + sum(int(run.counts.sum()) for run in runs),
    )


def residuals(
    before: StepModel, after: StepModel, runs: Sequence[Observed]
) -> tuple[RunResidual, ...]:
    """Compare both models with every statistic of *runs*."""
    rows = []
    for run in runs:
        old, new = (_predicted(run, model) for model in (before, after))
        rows += [
            RunResidual(
                run=run.name,
                metric=metric,
                statistic=statistic,
                measured_s=seen,
                before_fraction=old[metric, statistic] / seen - 1,
                after_fraction=new[metric, statistic] / seen - 1,
            )
            for (metric, statistic), seen in _measured(run).items()
        ]
    return tuple(rows)


def _factors(logs: NDArray[np.float64]) -> Scales:
    return Scales(*np.exp(logs).tolist())


def _gaps(
    model: StepModel, runs: Sequence[Observed], logs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Ln predicted - ln measured of every statistic of every run, shape (statistics,)."""
    tried = scaled(model, _factors(logs))
    gaps = []
    for run in runs:
        measured, predicted = _measured(run), _predicted(run, tried)
        gaps += [np.log(predicted[key] / seen) for key, seen in measured.items()]
        gaps += step_gaps(tried, run.steps)
    return np.array(gaps)


def _sds(run: Observed) -> list[float]:
    """Standard deviation of each of the gaps of a run."""
    known = [STATISTICS.get(key, PHASE_SD) for key in _measured(run)]
    return known + [STEPS_SD] * len(step_gaps(run.step_model, run.steps))


def _slopes(
    model: StepModel, runs: Sequence[Observed], logs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Derivatives of the gaps, shape (statistics, factors)."""
    columns = []
    for which in range(len(logs)):
        up, down = logs.copy(), logs.copy()
        up[which] += STEP
        down[which] -= STEP
        columns.append((_gaps(model, runs, up) - _gaps(model, runs, down)) / (2 * STEP))
    return np.column_stack(columns)


def _cost(gaps: NDArray[np.float64], logs: NDArray[np.float64], sds: NDArray[np.float64]) -> float:
    apart = np.abs(gaps / sds)
    bounded = np.where(apart <= BOUND, apart**2, 2 * BOUND * apart - BOUND**2)
    return float(bounded.sum() + ((logs / PRIOR) ** 2).sum())


def _measured(run: Observed) -> dict[tuple[str, str], float]:
    columns = {"ttft": run.ttft_s, "tpot": run.tpot_s, **run.phases_s}
    return {key: value for key, value in _statistics(columns, run.counts).items() if value > 0}


def _predicted(run: Observed, model: StepModel) -> dict[tuple[str, str], float]:
    system = deployed_system(run.deployment, model)
    found: Outcome = simulate_system(system, run.arrivals, seed=SEED, gaps=False)
    phases = {name: phase_s(found.parts_s, name) for name in PHASES}
    known = {name: seconds for name, seconds in phases.items() if seconds is not None}
    return _statistics({"ttft": found.ttft_s, "tpot": found.tpot_s, **known}, run.counts)


def _statistics(
    columns: dict[str, NDArray[np.float64]], counts: NDArray[np.bool_]
) -> dict[tuple[str, str], float]:
    """
    Return the statistics that are compared, of the requests that count; 0 where none has it.

    Predicted and measured are the same requests: those with one token have no TPOT in either.
    """
    compared = (*STATISTICS, *((name, "mean") for name in PHASES))
    found = {}
    for metric, statistic in compared:
        if metric in columns:
            values = columns[metric][counts]
            finite = values[np.isfinite(values)]
            if not len(finite):
                found[metric, statistic] = 0.0
            elif statistic == "mean":
                found[metric, statistic] = float(finite.mean())
            else:
                found[metric, statistic] = quantile(finite, LEVELS[statistic])
    return found
