"""The highest rate that so many GPUs hold within the SLO, by simulations of a few layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

from sizing.planner.candidates import (
    batch_limits,
    fewest_by_utilisation,
    list_candidates,
    unloaded_checks,
)
from sizing.planner.configuration import Configuration
from sizing.planner.deployment import gpus_with_spares
from sizing.planner.edge import LEAST_SHARE, RESOLUTION, STRIDE, Band, factor_to, highest, least
from sizing.planner.error_model import step_errors
from sizing.planner.pool_sizing import estimated_sizes, fluid_replicas
from sizing.planner.result import below_floor, fits_nowhere
from sizing.planner.search import SLACK_CEILING
from sizing.planner.simulated_check import SEEDS, Simulations
from sizing.planner.step_models import StepModels, utilisations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Inputs
    from sizing.planner.simulated_check import PlanVerdict

FINALISTS = 2
"""Layouts of each kind, split and aggregated, that are simulated: the highest by estimate."""

TOO_LOW = 0.85
"""Share of a rate that holds below which an estimate is not worth a simulation."""

FAR_TOO_LOW = 0.6
"""Share of the highest estimate below which one is not worth a simulation."""

OPTIONS = 6
"""Layouts and batch limits of each kind whose rates are estimated: the highest by utilisation."""

PRECISE = 0.95
"""Share of a limit up to which a latency of a precise run may come: beyond, chance may decide."""

QUICK = Band(least=0.86, aim=0.91, most=0.95)
"""
Shares of its tightest limit that the highest rate uses up in a quick run, which is too short for
the bursts that a precise one has.
"""

MOST_LOWERED = int(log(1 / LEAST_SHARE) / log(1 + RESOLUTION))
"""Steps by which an estimated rate may be below the one by utilisation."""

USUAL = 8
"""Steps by which it usually is: queues take about a fifth."""

UTILISATION = "pool saturates"
"""Limit that binds if no latency limit does."""

MAX_SHIFTS = 4
"""Moves of replicas from one pool to the other at one rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """
    A configuration at a rate, requests/s.

    Attributes:
        binds: what is missed first above the rate; empty: not known yet.
    """

    configuration: Configuration
    rate: float
    binds: str = ""


class RateSearch:
    """Layouts and simulations of one scenario, for any number of GPUs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.errors = step_errors(inputs, inputs.scenario.search.confidence_fraction)
        self.models = StepModels(inputs)
        self.known = list_candidates(self.models, self.errors)
        self.split = [
            each.limited(lowest.batch_limit)
            for each in self.known.split
            for lowest in batch_limits(self.models, each, self.errors)
        ]
        self.mixed = list(self.known.mixed)

    def highest(self, gpus: int, before: Held | None) -> Held | None:
        """Return the highest rate of *gpus*: at least *before*, that of fewer GPUs."""
        self.simulations = Simulations(self.models)
        climbed: list[Held] = []
        for guess in self._finalists(gpus, before):
            highest = max((each.rate for each in climbed), default=0.0)
            floor = max(_above(before), TOO_LOW * highest)
            if guess.rate >= TOO_LOW * floor:
                found = self._climbed(guess, gpus, floor, highest or guess.rate)
                climbed += [] if found is None else [found]
        return self._verified(climbed, _above(before)) or before

    def _finalists(self, gpus: int, before: Held | None) -> list[Held]:
        """
        Return the configurations with the highest estimated rates: split ones, then aggregated.

        The best layout of fewer GPUs comes first: it carries about as much a GPU.
        """
        found: list[Held] = []
        for options in (self.split, self.mixed):
            guesses = [self._estimated(each, gpus) for each in self._promising(options, gpus)]
            ranked = sorted((each for each in guesses if each), key=self._rank)
            best = {each.configuration.layout: each for each in reversed(ranked)}
            found += list(best.values())[: -FINALISTS - 1 : -1]
        highest = max((each.rate for each in found), default=0.0)
        found = [each for each in found if each.rate >= FAR_TOO_LOW * highest]
        if before is None:
            return found
        known, per_gpu = before.configuration.layout, before.rate / self._gpus(before.configuration)
        first = [each for each in found if each.configuration.layout == known]
        others = [each for each in found if each.configuration.layout != known]
        return [replace(each, rate=max(per_gpu * gpus, each.rate)) for each in first] + others

    def _rank(self, guess: Held) -> float:
        """Return less for what probably carries more: TTFT under load is not in eq. T6."""
        if guess.configuration.layout.prefill is not None:
            return -guess.rate
        checks = unloaded_checks(self.models, guess.configuration, self.errors)
        return -guess.rate * (SLACK_CEILING - max(check.ratio for check in checks))

    def _promising(self, options: list[Configuration], gpus: int) -> list[Configuration]:
        """Return the options with the highest rates by utilisation and slack, a few of them."""
        used = {each.layout: check.ratio for check, each in self.known.unloaded}
        known = [(self._ceiling(each, gpus)[0], each) for each in options]
        ranked = sorted(
            (each for each in known if each[0] > 0),
            key=lambda pair: -pair[0] * (SLACK_CEILING - used.get(pair[1].layout, 0.0)),
        )
        return [each for _, each in ranked[:OPTIONS]]

    def _ceiling(self, option: Configuration, gpus: int) -> tuple[float, Configuration]:
        """Return the rate at the allowed utilisation, and the sizes that reach it; 0: none fit."""
        most = self.inputs.scenario.search.max_utilisation_fraction
        most *= self.inputs.scenario.workload.requests_per_s
        used = utilisations(self.models, option.smallest, self.errors)
        best, prefill = (0.0, option), option.layout.prefill
        for count in range(1, gpus // prefill.gpus + 1) if prefill else (0,):
            sized = self._filled(option, gpus, {"prefill": count} if prefill else {})
            if sized is None:
                break
            rate = most * min(sized.replicas[role] / used[role] for role in used)
            if rate <= best[0]:
                break  # the rate rises to the best division, then falls
            best = rate, sized
        return best

    def _filled(
        self, option: Configuration, gpus: int, others: Mapping[str, int]
    ) -> Configuration | None:
        """Return *others*, by role, with all that decode beside them; `None`: none fit."""
        sized = option.sized({**others, option.last: 0})
        count = max(0, (gpus - sized.gpus) // option.layout.decode.gpus)
        while count > 0 and self._gpus(sized.sized({option.last: count})) > gpus:
            count -= 1
        return sized.sized({option.last: count}) if count else None

    def _gpus(self, chosen: Configuration) -> int:
        return sum(gpus_with_spares(self.inputs, chosen).values())

    def _estimated(self, option: Configuration, gpus: int) -> Held | None:
        """Return the option at the highest rate whose estimated sizes (eq. L2, T6) fit."""
        ceiling, _ = self._ceiling(option, gpus)
        estimate = fluid_replicas if option.last == "mixed" else estimated_sizes

        def rate(lowered: int) -> float:
            return ceiling / (1 + RESOLUTION) ** lowered

        def wanted(lowered: int) -> Configuration:
            models = self.models.at_rate(rate(lowered))
            lowest = fewest_by_utilisation(models, option, self.errors)
            return estimate(models, lowest, self.errors)

        at = least(lambda each: self._gpus(wanted(each)) <= gpus, USUAL, 1, MOST_LOWERED)
        if at is None:
            return None
        first = {role: count for role, count in wanted(at).replicas.items() if role == "prefill"}
        sized = self._filled(option, gpus, first)
        return None if sized is None else Held(configuration=sized, rate=rate(at))

    # --- simulations

    def _climbed(self, guess: Held, gpus: int, floor: float, rate: float) -> Held | None:
        """Find the rate that quick runs hold, from *rate* on; `None`: none above *floor*."""
        ceiling = self._ceiling(guess.configuration, gpus)[0]
        best, binds = guess, UTILISATION

        def used(rate: float) -> float:
            nonlocal best, binds
            held, verdict = self._held(best.configuration, rate, gpus)
            share = verdict.used if held else max(verdict.used, 1.0)
            if held is None or share > QUICK.most:
                binds = _limit(verdict)
            else:
                best = held
            return share

        found = highest(used, floor, ceiling, guess=rate, band=QUICK)
        return None if found is None else replace(best, binds=binds)

    def _held(
        self, chosen: Configuration, rate: float, gpus: int
    ) -> tuple[Held | None, PlanVerdict]:
        """Return sizes that hold at a rate, if any do, and the last verdict."""
        tried: list[Configuration] = []
        at = self.simulations.at_rate(rate)
        while True:
            verdict = at.holds(chosen, self.errors, quick=True)
            if verdict.holds:
                return Held(configuration=chosen, rate=rate), verdict
            tried.append(chosen)
            # Replicas move to the pool that the missed limit asks for, from the other one.
            prefill, wanted = chosen.replicas.get("prefill", 0), verdict.bottleneck_role
            moved = prefill + max(1, prefill // 32) * (1 if wanted == "prefill" else -1)
            shifted = self._filled(chosen, gpus, {"prefill": moved}) if prefill and moved else None
            if shifted is None or shifted in tried or len(tried) == MAX_SHIFTS:
                return None, verdict
            chosen = shifted

    def _verified(self, climbed: list[Held], floor: float) -> Held | None:
        """
        Return the highest rate that precise runs hold under every seed; `None`: none above *floor*.

        The configuration with the highest rate is tried first; what it misses lowers its rate, and
        another one may be the highest then.
        """
        left = list(climbed)
        while left:
            found = max(left, key=lambda each: each.rate)
            left.remove(found)
            at = self.simulations.at_rate(found.rate)
            verdicts = (at.holds(found.configuration, self.errors, seed=seed) for seed in SEEDS)
            missed = next((each for each in verdicts if not each.holds), None)
            if missed is None:
                return found
            if missed.exhausted:
                return None
            factor = min(max(factor_to(PRECISE, missed.used), 1 / STRIDE), 1 - RESOLUTION)
            if found.rate * factor > floor:
                left.append(replace(found, rate=found.rate * factor))
        return None

    def reason(self, gpus: int) -> str:
        """Say why so many GPUs hold no rate."""
        unloaded = list(self.known.unloaded)
        if not unloaded:
            return fits_nowhere(self.inputs, list(self.known.unfit)).reason
        options = [*self.split, *self.mixed]
        if not options:
            return below_floor(unloaded, self.inputs).reason
        least = min(self._gpus(each.smallest) for each in options)
        if least > gpus:
            return f"the smallest layout that may hold the SLO has {least} GPUs"
        return "no rate holds the SLO in simulations"


def _limit(verdict: PlanVerdict) -> str:
    """Say which limit a verdict missed or is nearest to, and whose pool it asks for."""
    check, role = verdict.check, verdict.bottleneck_role
    if check is None:
        return f"{role} pool saturates"
    return f"{check.name}: {role} pool"


def _above(best: Held | None) -> float:
    return 0.0 if best is None else best.rate * (1 + RESOLUTION)
