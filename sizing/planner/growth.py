"""How far a load may grow on a configuration."""

from __future__ import annotations

from math import floor, log
from typing import TYPE_CHECKING

from sizing.planner.edge import LEAST_SHARE, RESOLUTION, STRIDE, Band, factor_to, highest
from sizing.planner.simulated_check import Held, PlanVerdict, Simulations, under_seeds
from sizing.planner.step_models import utilisations

if TYPE_CHECKING:
    from sizing.planner.configuration import Configuration
    from sizing.planner.error_model import StepErrors

QUICK = Band(least=0.86, aim=0.91, most=0.95)
"""
Shares of its tightest limit that the highest rate uses up in a quick run, which is too short for
the bursts that a precise one has.
"""

PRECISE = 0.95
"""Share of a limit up to which a latency of a precise run may come: beyond, chance may decide."""

SLIGHTLY = 1e-6
"""Relative excess of a cost that stands for rounding."""


def edge(
    simulations: Simulations,
    errors: StepErrors,
    chosen: Configuration,
    *,
    above: float,
    guess: float | None = None,
) -> Held:
    """
    Return the highest rate that a configuration holds as a plan does; *above* if none higher.

    Rates are `RESOLUTION` apart, so that every search of one configuration ends at the same: quick
    runs say where to look, precise ones under every seed decide (docs/model.md, eq. E3). While one
    rate is decided, a free worker makes the runs of the next.

    Args:
        above: rate that is known to hold, requests/s; 0: none is.
        guess: rate that is tried first.
    """
    used = utilisations(simulations.models, chosen, errors)
    full_role = max(used, key=lambda role: used[role])
    search, load = simulations.inputs.scenario.search, simulations.inputs.scenario.workload
    full = load.requests_per_s * search.max_utilisation_fraction / used[full_role]

    def share(rate: float) -> float:
        verdict = simulations.at_rate(rate).holds(chosen, errors, quick=True)
        return verdict.used if verdict.holds else max(verdict.used, 1.0)

    def missed_at(rate: float) -> PlanVerdict | None:
        if rate > full:
            return PlanVerdict(holds=False, bottleneck_role=full_role, requests=0)
        verdict = under_seeds(simulations.at_rate(rate), chosen, errors)[-1]
        return None if verdict.holds else verdict

    first = min(guess or (above * full) ** 0.5, full * (1 - RESOLUTION))
    about = highest(share, above, full, guess=first, band=QUICK) or above or full
    lowest = _step(above) + 1 if above else _step(full * LEAST_SHARE)
    at, rate, missed, binds = max(lowest, _step(about)), above, None, ""
    while at != missed:
        if at + 1 != missed and _rate(at + 1) <= full:
            simulations.at_rate(_rate(at + 1)).verify_ahead(chosen, errors)
        verdict = missed_at(_rate(at))
        if verdict is None:
            rate, at = _rate(at), at + 1
            continue
        missed, binds = at, _limit(verdict)
        if rate > above or at == lowest or verdict.exhausted:
            break
        at = max(lowest, at - _steps_down(verdict))
    return Held(configuration=chosen, rate=rate, binds=binds)


def _step(rate: float) -> int:
    """Return the number of the highest of the rates `RESOLUTION` apart that is no higher."""
    return floor(log(rate) / log(1 + RESOLUTION) + SLIGHTLY)


def _rate(step: int) -> float:
    return float((1 + RESOLUTION) ** step)


def _steps_down(verdict: PlanVerdict) -> int:
    """Return the steps to the rate at which a missed limit probably holds."""
    if verdict.check is None:
        return 1
    factor = min(max(factor_to(PRECISE, verdict.used), 1 / STRIDE), 1.0)
    return max(1, round(-log(factor) / log(1 + RESOLUTION)))


def _limit(verdict: PlanVerdict) -> str:
    """Return the limit that a verdict missed, and the pool that it asks for."""
    check, pool = verdict.check, f"{verdict.bottleneck_role} pool"
    return f"{pool} saturates" if check is None else f"{check.name}: {pool}"
