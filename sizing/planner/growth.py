"""How far a load may grow: the highest rate of a configuration, and of as many GPUs."""

from __future__ import annotations

from math import floor, log
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.configuration import Configuration, cost_of, cost_of_gpu
from sizing.planner.deployment import gpus_with_spares
from sizing.planner.edge import LEAST_SHARE, RESOLUTION, STRIDE, Band, factor_to, highest
from sizing.planner.simulated_check import SEEDS, Held, PlanVerdict, Simulations
from sizing.planner.step_models import utilisations

if TYPE_CHECKING:
    from sizing.planner.error_model import StepErrors
    from sizing.planner.search import LayoutSearch

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
    runs say where to look, precise ones under every seed decide (docs/model.md, eq. E3).

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
        at = simulations.at_rate(rate)
        verdicts = (at.holds(chosen, errors, seed=seed) for seed in SEEDS)
        return next((verdict for verdict in verdicts if not verdict.holds), None)

    first = min(guess or (above * full) ** 0.5, full * (1 - RESOLUTION))
    about = highest(share, above, full, guess=first, band=QUICK) or above or full
    lowest = _step(above) + 1 if above else _step(full * LEAST_SHARE)
    at, rate, missed, binds = max(lowest, _step(about)), above, None, ""
    while at != missed:
        verdict = missed_at(_rate(at))
        if verdict is None:
            rate, at = _rate(at), at + 1
            continue
        missed, binds = at, _limit(verdict)
        if rate > above or at == lowest or verdict.exhausted:
            break
        at = max(lowest, at - _steps_down(verdict))
    return Held(configuration=chosen, rate=rate, binds=binds)


class Growth:
    """The highest rates of one scenario within a cost, over every layout that a plan may have."""

    def __init__(self, search: LayoutSearch) -> None:
        self.search, self.errors = search, search.errors
        self.simulations = Simulations(search.models)

    def highest(self, limit: float) -> Held | None:
        """
        Return the highest rate within a cost *limit*; `None`: none is held.

        The rate of a plan that takes as much is found in a few quick searches, then that of its
        configuration, and then those of others, as far as a quick search finds them at a rate that
        is higher still.
        """
        rate, stride = limit / self._cost_per_rate(), STRIDE
        lowest = rate * LEAST_SHARE
        while rate > lowest:
            chosen = self._quickest(rate)
            taken = np.inf if chosen is None else self._with_spares(chosen)
            if chosen is not None and taken <= limit * (1 + SLIGHTLY):
                held = self._edge(chosen, 0.0, rate)
                if held.rate:
                    return self._widest(held, limit)
            rate *= min(max(limit / taken, 1 / stride), 1 / (1 + RESOLUTION))
            stride = min(stride**2, 1 / LEAST_SHARE)
        return None

    def _edge(self, chosen: Configuration, above: float, guess: float) -> Held:
        return edge(self.simulations, self.errors, chosen, above=above, guess=guess)

    def _widest(self, held: Held, limit: float) -> Held:
        while True:
            rate = held.rate * (1 + RESOLUTION)
            chosen = self._within(rate, limit)
            if chosen is None:
                return held
            higher = self._edge(chosen, held.rate, rate)
            if higher.rate <= held.rate:
                return held
            held = higher

    def _within(self, rate: float, limit: float) -> Configuration | None:
        """Return what a quick search finds at a rate, spares included, within a cost."""
        below = limit * (1 + SLIGHTLY)
        while below > 0:
            chosen = self._quickest(rate, below)
            excess = 0.0 if chosen is None else self._with_spares(chosen) - limit
            if excess <= limit * SLIGHTLY:
                return chosen
            below -= excess
        return None

    def _quickest(self, rate: float, below: float = np.inf) -> Configuration | None:
        return self.search.at_rate(self.simulations.at_rate(rate)).quickest(below)

    def _with_spares(self, chosen: Configuration) -> float:
        gpus = gpus_with_spares(self.search.inputs, chosen).items()
        return sum(count * cost_of_gpu(self.search.inputs, kind) for kind, count in gpus)

    def _cost_per_rate(self) -> float:
        """Return the least cost of a request/s: every pool at the allowed utilisation."""
        inputs, models = self.search.inputs, self.search.models
        costs = []
        for one in (*self.search.candidates.split, *self.search.candidates.mixed):
            used = utilisations(models, one, self.errors)
            shapes = one.layout.shapes
            costs.append(sum(used[role] * cost_of(inputs, shapes[role]) for role in shapes))
        share = inputs.scenario.search.max_utilisation_fraction
        return min(costs) / share / inputs.scenario.workload.requests_per_s


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
