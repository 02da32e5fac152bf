"""The highest rate that so many GPUs hold within the SLO, by simulations of a few layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizing.planner.candidates import (
    Candidate,
    batch_limits,
    fewest_by_utilisation,
    list_candidates,
    unloaded_checks,
    utilisations,
)
from sizing.planner.deployment import gpus_with_spares
from sizing.planner.error_model import step_errors
from sizing.planner.pool_sizing import estimated_sizes, fluid_replicas
from sizing.planner.result import below_floor, fits_nowhere
from sizing.planner.search import SLACK_CEILING
from sizing.planner.simulated_check import SEEDS, Simulations, SloSimulator
from sizing.planner.step_models import StepModels

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.pool_sizing import Sizes
    from sizing.planner.result import PlanVerdict

FINALISTS = 2
"""Layouts of each kind, split and aggregated, that are simulated: the highest by estimate."""

RESOLUTION = 0.03
"""Relative step to which quick runs resolve the rate, and by which precise runs lower it."""

TOO_LOW = 0.85
"""Share of a rate that holds below which an estimate is not worth a simulation."""

FAR_TOO_LOW = 0.6
"""Share of the highest estimate below which one is not worth a simulation."""

OPTIONS = 6
"""Layouts and batch limits of each kind whose rates are estimated: the highest by utilisation."""

LEAST_SHARE = 1e-3
"""Share of the rate by utilisation below which nothing is tried: the SLO does not hold there."""

PRECISE = 0.95
"""Share of a limit up to which a latency of a precise run may come: beyond, chance may decide."""

QUICK = (0.86, 0.91, 0.95)
"""
The least share that a quick run is to use up of its tightest limit, the share that is aimed at, and
the most: it is too short for the bursts that a precise run has.
"""

STEEPNESS = 1.5
"""Per cent by which a latency near its limit changes, for each by which the rate does."""

STRIDE = 1.15
"""Factor by which one run changes the rate at most; it is squared from run to run."""

INSENSITIVE = 2.0
"""Factor that a run may change the rate by, from which on one that missed has to: some latencies
miss their limit by little at any rate."""

SATURATED = 2.0
"""Share of a limit that stands for no latency at all: a pool that no run was needed for."""

UTILISATION = "pool saturates"
"""Limit that binds if no latency limit does."""

MAX_SHIFTS = 4
"""Moves of replicas from one pool to the other at one rate."""


@dataclass(frozen=True, slots=True)
class Held:
    """A configuration at a rate, and what is missed first above it."""

    candidate: Candidate
    binds: str

    @property
    def rate(self) -> float:
        """Requests/s."""
        return self.candidate.tandem.workload.requests_per_s


class RateSearch:
    """Layouts and simulations of one scenario, for any number of GPUs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.errors = step_errors(inputs, inputs.scenario.search.confidence_fraction)
        self.known = list_candidates(inputs, StepModels(inputs), self.errors)
        self.split = [
            each.limited(bounded.slow.tandem.decode.max_batch_size)
            for each in self.known.split
            for bounded in batch_limits(each.with_errors(self.errors), inputs)
        ]
        self.mixed = list(self.known.mixed)

    def highest(self, gpus: int, before: Held | None) -> Held | None:
        """Return the highest rate of *gpus*: at least *before*, that of fewer GPUs."""
        self.simulations = Simulations(self.inputs)
        self.quick = SloSimulator(self.simulations, self.errors, precise=False)
        climbed: list[Held] = []
        for guess in self._finalists(gpus, before):
            highest = max((each.rate for each in climbed), default=0.0)
            floor = max(_above(before), TOO_LOW * highest)
            if _rate(guess) >= TOO_LOW * floor:
                found = self._climbed(guess, gpus, floor, highest or _rate(guess))
                climbed += [] if found is None else [found]
        return self._verified(climbed, _above(before)) or before

    def _finalists(self, gpus: int, before: Held | None) -> list[Candidate]:
        """
        Return the configurations with the highest estimated rates: split ones, then aggregated.

        The best layout of fewer GPUs comes first: it carries about as much a GPU.
        """
        found = []
        for options in (self.split, self.mixed):
            guesses = [self._estimated(each, gpus) for each in self._promising(options, gpus)]
            ranked = sorted((each for each in guesses if each), key=self._rank)
            found += list({each.layout: each for each in reversed(ranked)}.values())[
                : -FINALISTS - 1 : -1
            ]
        highest = max((_rate(each) for each in found), default=0.0)
        found = [each for each in found if _rate(each) >= FAR_TOO_LOW * highest]
        if before is None:
            return found
        known, per_gpu = before.candidate.layout, before.rate / self._gpus(before.candidate)
        return [
            each.at_rate(max(per_gpu * gpus, _rate(each))) if each.layout == known else each
            for each in sorted(found, key=lambda each: each.layout != known)
        ]

    def _rank(self, guess: Candidate) -> float:
        """Return less for what probably carries more: TTFT under load is not in eq. T6."""
        if guess.layout.prefill is not None:
            return -_rate(guess)
        checks = unloaded_checks(guess, self.inputs.scenario.promises, self.errors)
        return -_rate(guess) * (SLACK_CEILING - max(check.ratio for check in checks))

    def _promising(self, options: list[Candidate], gpus: int) -> list[Candidate]:
        """Return the options with the highest rates by utilisation and slack, a few of them."""
        used = {each.layout: check.ratio for check, each in self.known.unloaded}
        known = [(self._ceiling(each, gpus)[0], each) for each in options]
        ranked = sorted(
            (each for each in known if each[0] > 0),
            key=lambda pair: -pair[0] * (SLACK_CEILING - used.get(pair[1].layout, 0.0)),
        )
        return [each for _, each in ranked[:OPTIONS]]

    def _ceiling(self, option: Candidate, gpus: int) -> tuple[float, Sizes]:
        """Return the rate at the allowed utilisation, and the sizes that reach it; 0: none fit."""
        slow = option.sized(1, 1).with_errors(self.errors)
        most = self.inputs.scenario.search.max_utilisation_fraction * _rate(option)
        load = utilisations(slow)
        last = load.get("decode") or load["mixed"]
        found: tuple[float, Sizes] = (0.0, (0, 0))
        if option.layout.prefill is None:
            count = self._fitting(option, gpus, 0)
            return most * count / last, (0, count)
        for prefill in range(1, gpus // option.layout.prefill.gpus + 1):
            decode = self._fitting(option, gpus, prefill)
            rate = most * min(prefill / load["prefill"], decode / last)
            if rate <= found[0]:
                break  # the rate rises to the best division, then falls
            found = rate, (prefill, decode)
        return found

    def _fitting(self, option: Candidate, gpus: int, prefill: int) -> int:
        """Return the most decode or mixed replicas that fit beside those of prefill."""
        first, each = option.layout.prefill, option.layout.decode.gpus
        count = (gpus - (0 if first is None else prefill * first.gpus)) // each
        while count > 0 and self._gpus(option.sized(prefill, count)) > gpus:
            count -= 1
        return max(0, count)

    def _gpus(self, chosen: Candidate) -> int:
        return sum(gpus_with_spares(self.inputs, chosen).values())

    def _estimated(self, option: Candidate, gpus: int) -> Candidate | None:
        """Return the option at the highest rate whose estimated sizes (eq. L2, T6) fit."""
        high, sizes = self._ceiling(option, gpus)
        low, best = high * LEAST_SHARE, sizes
        while high > low * (1 + RESOLUTION):
            middle = (low * high) ** 0.5
            one = option.at_rate(middle).sized(min(1, sizes[0]), 1)
            slow = one.with_errors(self.errors)
            lowest = fewest_by_utilisation(slow, self.inputs)
            wanted = (
                estimated_sizes(one, self.inputs, self.errors, lowest)
                if sizes[0]
                else (0, fluid_replicas(self.inputs, slow, lowest[1]))
            )
            if self._gpus(one.sized(*wanted)) <= gpus:
                low, best = middle, wanted
            else:
                high = middle
        most = self._fitting(option, gpus, best[0])
        return option.at_rate(low).sized(best[0], most) if most else None

    # --- simulations

    def _climbed(self, guess: Candidate, gpus: int, floor: float, rate: float) -> Held | None:
        """
        Find the rate that quick runs hold, from *rate* on; `None`: none above *floor*.

        Each run says how near its tightest limit is, and so about how far away the rate is that
        uses up as much of it as `QUICK` says; between a rate that is low enough and one that is
        not, it is bisected.
        """
        ceiling = self._ceiling(guess, gpus)[0]
        low, high, best, binds, stride = floor, ceiling, None, UTILISATION, STRIDE
        while low <= rate < high > low * (1 + RESOLUTION) and high > ceiling * LEAST_SHARE:
            tried, verdict = self._held((best or guess).at_rate(rate), gpus)
            ratio = SATURATED if verdict.check is None else verdict.check.ratio
            if tried is None or ratio > QUICK[-1]:
                high, binds = rate, _limit(verdict)
            else:
                best, low = tried, rate
                if ratio >= QUICK[0] and high < ceiling:
                    break
            rate *= min(max(_factor(ratio, QUICK[1]), 1 / stride), stride)
            if best is None and stride > INSENSITIVE:
                rate = min(rate, high / stride)
            known = best is not None and not low * (1 + RESOLUTION / 2) < rate < high
            overshot = rate < low and high > low * STRIDE**2  # what fewer GPUs carry holds
            if known or overshot:
                rate = (low * high) ** 0.5
            stride = min(stride**2, 1 / LEAST_SHARE)
        return None if best is None else Held(best, binds)

    def _held(self, chosen: Candidate, gpus: int) -> tuple[Candidate | None, PlanVerdict]:
        """Return sizes that hold at the candidate's rate, if any do, and the last verdict."""
        tried: list[Candidate] = []
        while True:
            verdict = self.quick.verdict(chosen)
            if verdict.holds:
                return chosen, verdict
            tried.append(chosen)
            # Replicas move to the pool that the missed limit asks for, from the other one.
            prefill, wanted = chosen.sizes[0], verdict.bottleneck_role == "prefill"
            moved = prefill + max(1, prefill // 32) * (1 if wanted else -1)
            decode = self._fitting(chosen, gpus, moved) if prefill and moved > 0 else 0
            chosen = chosen.sized(moved, decode)
            if not decode or chosen in tried or len(tried) == MAX_SHIFTS:
                return None, verdict

    def _verified(self, climbed: list[Held], floor: float) -> Held | None:
        """
        Return the highest rate that precise runs hold under every seed; `None`: none above *floor*.

        The configuration with the highest rate is tried first; what it misses lowers its rate, and
        another one may be the highest then.
        """
        precise = SloSimulator(self.simulations, self.errors)
        left = list(climbed)
        while left:
            found = max(left, key=lambda each: each.rate)
            left.remove(found)
            verdicts = (precise.verdict(found.candidate, seed=seed) for seed in SEEDS)
            missed = next((each for each in verdicts if not each.holds), None)
            if missed is None:
                return found
            if missed.exhausted:
                return None
            ratio = SATURATED if missed.check is None else missed.check.ratio
            factor = min(max(_factor(ratio, PRECISE), 1 / STRIDE), 1 - RESOLUTION)
            if found.rate * factor > floor:
                left.append(replace(found, candidate=found.candidate.at_rate(found.rate * factor)))
        return None

    def reason(self, gpus: int) -> str:
        """Say why so many GPUs hold no rate."""
        unloaded = list(self.known.unloaded)
        if not unloaded:
            return fits_nowhere(self.inputs, list(self.known.unfit)).reason
        options = [*self.split, *self.mixed]
        if not options:
            return below_floor(unloaded, self.inputs).reason
        least = min(self._gpus(each.sized(min(1, each.sizes[0]), 1)) for each in options)
        if least > gpus:
            return f"the smallest layout that may hold the SLO has {least} GPUs"
        return "no rate holds the SLO in simulations"


def _factor(ratio: float, wanted: float) -> float:
    """Return the factor on a rate by which the share of its tightest limit becomes *wanted*."""
    return float((wanted / ratio) ** (1 / STEEPNESS))


def _limit(verdict: PlanVerdict) -> str:
    """Say which limit a verdict missed or is nearest to, and whose pool it asks for."""
    check, role = verdict.check, verdict.bottleneck_role
    if check is None:
        return f"{role} pool saturates"
    return f"{check.name}: {role} pool"


def _above(best: Held | None) -> float:
    return 0.0 if best is None else best.rate * (1 + RESOLUTION)


def _rate(candidate: Candidate) -> float:
    return candidate.tandem.workload.requests_per_s
