"""Factors on a calibration's constants, from how far replayed runs are from measured ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from minicluster.phases import phase_s
from minicluster.stats.quantiles import LEVELS, quantile
from sizing.evidence.refit.observed import PHASES
from sizing.evidence.refit.scales import PRIOR, Scales, scaled, scaled_interference, scaled_path
from sizing.simulation.outcome import simulate
from sizing.simulation.planned import deployed_system

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from minicluster.plan import StepModel
    from minicluster.specs.calibration import CalibrationSpec
    from sizing.evidence.refit.observed import Observed
    from sizing.simulation.outcome import Outcome

STATISTICS = {
    ("ttft", "mean"): 0.06,
    ("ttft", "p50"): 0.08,
    ("ttft", "p90"): 0.10,
    ("ttft", "p99"): 0.20,
    ("tpot", "mean"): 0.04,
    ("tpot", "p90"): 0.08,
}
"""Statistics compared, with the standard deviation of their logarithms between runs of one load."""

PHASE_SD = 0.08
BOUND = 2.0
STEP = 0.05
ROUNDS = 5
SEED = 0


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
    as ten runs do; what runs cannot tell stays where it was.

    Source:
        Maximum a posteriori by Gauss and Newton, differences by central steps of 5 %. Beyond
        `BOUND` standard deviations a gap counts linearly (Huber, 1964): what the model has no
        constant for must not bend the others.
    """
    found = np.zeros(len(PRIOR.logs))
    sds, priors = _deviations(runs), np.exp(PRIOR.logs)
    best = _cost(gaps := _gaps(model, runs, found), found, sds, priors)
    for _ in range(ROUNDS):
        slopes = _slopes(model, runs, found)
        weights = np.sqrt(np.minimum(1.0, BOUND / np.maximum(np.abs(gaps / sds), 1e-12))) / sds
        rows = np.vstack([slopes * weights[:, None], np.diag(1 / priors)])
        aims = np.concatenate([-gaps * weights, -found / priors])
        step = np.linalg.lstsq(rows, aims, rcond=None)[0]
        for shorter in (1.0, 0.5, 0.25):
            tried = found + shorter * step
            seen = _gaps(model, runs, tried)
            cost = _cost(seen, tried, sds, priors)
            if cost < best:
                break
        else:
            break
        gained, best, found, gaps = best - cost, cost, tried, seen
        if gained < 1e-3 * best:
            break
    return Scales.of(found)


def recalibrated(
    before: CalibrationSpec, scales: Scales, runs: Sequence[Observed], *, name: str
) -> CalibrationSpec:
    """Return the constants times the factors that *runs* gave, under a new name."""
    return replace(
        before,
        name=name,
        date=datetime.now(tz=UTC).date().isoformat(),
        num_rows=before.num_rows + sum(int(run.counts.sum()) for run in runs),
        prefill=before.prefill.scaled(scales.prefill),
        decode=before.decode.scaled(scales.decode),
        path=scaled_path(before.path, scales.path),
        interference=scaled_interference(before.interference, scales),
    )


def residuals(
    before: StepModel, after: StepModel, runs: Sequence[Observed]
) -> tuple[RunResidual, ...]:
    """Compare both models with every statistic of *runs*."""
    rows = []
    for run in runs:
        measured = _measured(run)
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
            for (metric, statistic), seen in measured.items()
        ]
    return tuple(rows)


def _gaps(
    model: StepModel, runs: Sequence[Observed], logs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Ln predicted - ln measured of every statistic of every run, shape (statistics,)."""
    tried = scaled(model, Scales.of(logs))
    gaps = []
    for run in runs:
        measured, predicted = _measured(run), _predicted(run, tried)
        gaps += [np.log(predicted[key] / seen) for key, seen in measured.items()]
    return np.array(gaps)


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


def _cost(
    gaps: NDArray[np.float64],
    logs: NDArray[np.float64],
    sds: NDArray[np.float64],
    priors: NDArray[np.float64],
) -> float:
    apart = np.abs(gaps / sds)
    bounded = np.where(apart <= BOUND, apart**2, 2 * BOUND * apart - BOUND**2)
    return float(bounded.sum() + ((logs / priors) ** 2).sum())


def _deviations(runs: Sequence[Observed]) -> NDArray[np.float64]:
    """Standard deviation of each gap, shape (statistics,)."""
    return np.array([STATISTICS.get(key, PHASE_SD) for run in runs for key in _measured(run)])


def _measured(run: Observed) -> dict[tuple[str, str], float]:
    columns = {"ttft": run.ttft_s, "tpot": run.tpot_s}
    found = {
        (metric, statistic): value
        for metric, statistic in STATISTICS
        if (value := _statistic(columns[metric][run.counts], statistic)) > 0
    }
    for name in PHASES:
        reported = run.phases_s.get(name)
        if reported is not None and (value := _statistic(reported[run.counts], "mean")) > 0:
            found[name, "mean"] = value
    return found


def _predicted(run: Observed, model: StepModel) -> dict[tuple[str, str], float]:
    system = deployed_system(run.deployment, model)
    outcome: Outcome = simulate(system, run.arrivals, seed=SEED)
    columns = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s}
    # Of the same requests as measured: those with one token have no TPOT on either side.
    found = {
        (metric, statistic): _statistic(columns[metric][run.counts], statistic)
        for metric, statistic in STATISTICS
    }
    for name in PHASES:
        whole = phase_s(outcome.parts_s, name)
        assert whole is not None  # noqa: S101  (a simulation knows every phase)
        found[name, "mean"] = _statistic(whole[run.counts], "mean")
    return found


def _statistic(values: NDArray[np.float64], statistic: str) -> float:
    """Return a mean or percentile of the finite values; 0 if there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0
    if statistic == "mean":
        return float(finite.mean())
    return quantile(finite, LEVELS[statistic])
