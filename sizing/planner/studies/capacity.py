"""The inverse of a plan: the highest rate that so many GPUs hold within the SLO."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.plan import Prediction
from sizing.planner.configuration import Configuration, cost_of, cost_of_gpu, with_search
from sizing.planner.deployment import gpus_with_spares
from sizing.planner.edge import LEAST_SHARE, RESOLUTION, STRIDE
from sizing.planner.growth import SLIGHTLY, edge
from sizing.planner.plan import budgets, own_inputs
from sizing.planner.predict import prediction_of
from sizing.planner.result import below_floor, fits_nowhere
from sizing.planner.search import LayoutSearch
from sizing.planner.simulated_check import Held, Simulations
from sizing.planner.step_models import utilisations
from sizing.planner.studies.cost import Running, require_price, running_of
from sizing.planner.studies.defaults import THINK_S
from sizing.planner.workers import NO_WORKERS, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minicluster.plan import Inputs

MAX_GPUS = 131_072
"""GPUs beyond which a search is no matter of minutes."""

MAX_DIVISIONS = 8
"""Divisions of GPUs between the own pools of classes that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPoint:
    """
    What so many GPUs carry within the SLO, at its percentile and confidence.

    Attributes:
        used_gpus: of these, in the layout, spares included.
        requests_per_s: the highest rate that was found to hold; 0: none.
        layout: pools as options of `sizing predict`; empty where there is none, and for own pools.
        max_num_seqs: batch limit of a decode or mixed replica.
        users: in a closed loop with the think time; each has one request or thinks.
        prediction: latencies and throughput at that rate, with step times as predicted; `None` for
            own pools.
        own: of classes of requests on pools of their own, where these carry more, what each class's
            pools carry at that rate; empty: all share pools.
        binds: the limit that is missed first above that rate.
        reason: why there is no rate; empty where there is one.
    """

    gpus: int
    used_gpus: int = 0
    requests_per_s: float = 0.0
    layout: str = ""
    max_num_seqs: int = 0
    users: float = 0.0
    prediction: Prediction | None = None
    own: dict[str, CapacityPoint] = field(default_factory=dict)
    running: Running | None = None
    binds: str = ""
    reason: str = ""

    @property
    def output_tokens_per_s(self) -> float:
        """Return the output tokens per second of all pools; 0 where no rate holds."""
        own = sum(each.output_tokens_per_s for each in self.own.values())
        return own if self.prediction is None else self.prediction.output_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(Shown):
    """
    The capacity of one or several numbers of GPUs, ascending.

    Attributes:
        think_s: of a user, between an answer and the next request.
        confidence_fraction: chance that the SLO holds at each point's rate, for each class on pools
            of its own; `None` on a calibrated machine.
        interrupted: whether it was stopped before the last of the numbers asked for.
    """

    think_s: float
    percentile: str
    confidence_fraction: float | None
    points: tuple[CapacityPoint, ...]
    interrupted: bool = False


def capacity(
    inputs: Inputs,
    gpus: Sequence[int],
    *,
    think_s: float | None = None,
    workers: Workers = NO_WORKERS,
    progress: Callable[[int, int], None] | None = None,
) -> Capacity:
    """
    Return the highest rate that each number of GPUs holds within the SLO.

        users = rate (E[e2e] + think)      (Little's law; docs/model.md, eq. E3)

    The search is that of `sizing plan`, at rates at which its plan takes as many GPUs, and the
    highest rate is found and verified as the headroom of a plan is (`growth.edge`). What fewer GPUs
    carry more of them carry, too.

    Classes of requests keep their shares of the rate. As in a plan (`search.class_pools`) they
    share pools, or the GPUs are divided between pools of their own so that every class's pools hold
    about the same rate, whichever carries more.

    Args:
        inputs: a scenario; its rate does not matter.
        gpus: numbers of GPUs, spare replicas included.
        think_s: seconds between an answer and the same user's next request; absent: those of the
            load's users, else 10.
        workers: processes beside this one; they do not change the rates.
        progress: is told how many of the numbers are done, and of how many.

    Raises:
        InputError: an impossible number, or a scenario that cannot be planned at all.
        KeyboardInterrupt: Ctrl-C before the first number; after it the curve so far is returned.

    Ignores:
        Local prefill thresholds that a plan's search would choose (`search.local_threshold_tokens`
        is obeyed), so that a plan at this rate may need fewer GPUs; and that its search may leave
        out the layout that was found here, so that it may need more. That users in a closed loop
        slow down with the system: arrivals are Poisson.
    """
    counts = sorted(set(gpus))
    if not counts or not 1 <= counts[0] <= counts[-1] <= MAX_GPUS:
        raise InputError(
            "--gpus", ", ".join(map(str, gpus)), f"whole numbers from 1 to {MAX_GPUS:,}"
        )
    if think_s is not None and not 0 <= think_s < np.inf:
        raise InputError("--think-seconds", think_s, "seconds, 0 or more")
    kinds = _kinds(inputs, think_s, workers)
    points: list[CapacityPoint] = []
    try:
        for count in counts:
            found = [each.point(count) for each in kinds]
            found += [replace(each, gpus=count) for each in points[-1:]]
            points.append(max(found, key=lambda each: each.requests_per_s))
            if progress is not None:
                progress(len(points), len(counts))
    except KeyboardInterrupt:
        if not points:
            raise
    return Capacity(
        think_s=_think_s(inputs, think_s),
        percentile=inputs.scenario.slo.percentile,
        confidence_fraction=(
            inputs.scenario.search.confidence_fraction if inputs.calibration is None else None
        ),
        points=tuple(points),
        interrupted=len(points) < len(counts),
    )


def _think_s(inputs: Inputs, asked: float | None) -> float:
    """Return the mean think time of requests: as *asked*, else as the users of the load have it."""
    if asked is not None:
        return asked
    load = inputs.scenario.workload
    thinking = sum(
        part.requests_per_s * (THINK_S if part.users is None else part.think_s)
        for part in load.parts
    )
    return thinking / load.requests_per_s


def _kinds(inputs: Inputs, think_s: float | None, workers: Workers) -> list[_Pools | _OwnPools]:
    """Return the pools that a scenario asks for: shared ones, own ones of its classes, or both."""
    wanted, classes = inputs.scenario.search.class_pools, len(inputs.scenario.workload.classes)
    found: list[_Pools | _OwnPools] = []
    if wanted != "own" or classes <= 1:
        found.append(_Pools(inputs, think_s, workers))
    if wanted != "shared" and classes > 1:
        found.append(_OwnPools(inputs, think_s, workers))
    return found


def gpus_for_usd(inputs: Inputs, usd_per_hour: float) -> int:
    """
    Return the GPUs that so many dollars an hour pay for, energy included where it is paid apart.

    Raises:
        InputError: GPUs of several kinds, without a price, or not even one of them.
    """
    place, (kind, *others) = "--usd-per-hour", inputs.kinds
    if others:
        raise InputError(place, usd_per_hour, "one kind of GPU in search.gpus")
    require_price(inputs, place)
    one = inputs.usd_per_hour({kind: 1}) or 0.0
    if not one <= usd_per_hour <= MAX_GPUS * one:
        expected = f"the price of 1 to {MAX_GPUS:,} {kind}, {one:,.2f} each"
        raise InputError(place, usd_per_hour, expected)
    return int(usd_per_hour / one + 1e-9)


def gpus_within_budgets(inputs: Inputs) -> int:
    """
    Return how many GPUs `cluster.max_gpus` and the budgets of `[cost]` allow.

    Of several kinds in search.gpus it is `cluster.max_gpus`: a number says nothing of their cost.

    Raises:
        InputError: a budget of GPUs without a price or power, or of less than one GPU.
    """
    (kind, *others), most = inputs.kinds, inputs.cluster.max_gpus
    for each in [] if others else budgets(inputs):
        one = each.taken({kind: 1}) or 0.0
        most = min(most, int(each.most / one + 1e-9))
        if most < 1:
            raise InputError(f"cost.{each.key}", each.most, f"at least {one:g}, for one {kind}")
    return most


class Growth:
    """The highest rates of one scenario within a cost, over every layout that a plan may have."""

    def __init__(self, search: LayoutSearch) -> None:
        self.search, self.errors = search, search.errors
        self.simulations = Simulations(search.models, workers=search.workers)

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


class _Pools:
    """The highest rate of one load by the number of GPUs; a rate that was found is kept."""

    def __init__(self, inputs: Inputs, think_s: float | None, workers: Workers) -> None:
        self.inputs, self.think_s = with_search(inputs, objective="gpus"), _think_s(inputs, think_s)
        self.search = LayoutSearch(self.inputs, workers=workers)
        self.known: dict[int, Held | None] = {}

    def highest(self, gpus: int) -> Held | None:
        """Return the highest rate of *gpus*, whatever other numbers were asked for."""
        if gpus not in self.known:
            search = copy(self.search)
            search.inputs = replace(
                self.inputs, cluster=replace(self.inputs.cluster, max_gpus=gpus)
            )
            growth = Growth(search) if self._smallest() <= gpus else None
            self.known[gpus] = None if growth is None else growth.highest(gpus)
        return self.known[gpus]

    def _smallest(self) -> float:
        """Return the GPUs of the smallest layout that may hold the SLO; infinite: there is none."""
        known = self.search.candidates
        sizes = (gpus_with_spares(self.inputs, one) for one in (*known.split, *known.mixed))
        return min((float(sum(size.values())) for size in sizes), default=inf)

    def _reason(self, gpus: int) -> str:
        known, smallest = self.search.candidates, self._smallest()
        if not known.unloaded:
            return fits_nowhere(self.inputs, list(known.unfit)).reason
        if smallest == inf:
            return below_floor(list(known.unloaded), self.inputs).reason
        if smallest > gpus:
            return f"the smallest layout that may hold the SLO has {smallest:.0f} GPUs"
        return "no rate holds the SLO in simulations"

    def point(self, gpus: int, rate: float | None = None) -> CapacityPoint:
        """Return what *gpus* carry at their highest rate, or at a lower one."""
        held = self.highest(gpus)
        if held is None:
            return CapacityPoint(gpus=gpus, reason=self._reason(gpus))
        rate = held.rate if rate is None else rate
        chosen, at = held.configuration, Simulations(self.search.models).at_rate(rate)
        predicted = prediction_of(at.models, chosen, at.predicted(chosen))
        kinds = gpus_with_spares(self.inputs, chosen)
        return CapacityPoint(
            gpus=gpus,
            used_gpus=sum(kinds.values()),
            requests_per_s=rate,
            layout=str(chosen),
            max_num_seqs=chosen.batch_limit,
            users=rate * (predicted.e2e.mean_s + self.think_s),
            prediction=predicted,
            running=running_of(self.inputs, kinds, predicted.output_tokens_per_s),
            binds=held.binds,
        )


class _OwnPools:
    """The highest rate of classes on separate pools; each class keeps its share of the load."""

    def __init__(self, inputs: Inputs, think_s: float | None, workers: Workers) -> None:
        load = inputs.scenario.workload
        self.inputs = inputs
        self.pools = {
            name: _Pools(each, think_s, workers) for name, each in own_inputs(inputs).items()
        }
        self.shares = {each.name: each.requests_per_s / load.requests_per_s for each in load.parts}
        self.needs = dict.fromkeys(self.pools, 1.0)

    def point(self, gpus: int) -> CapacityPoint:
        """
        Divide *gpus* between the classes until a division comes again; return the best.

        The next division is as the needs are at the last one, and where that was tried the best
        one, with a GPU moved from the class with the most room to the one that limits the rate.
        """
        if gpus < len(self.pools):
            return CapacityPoint(gpus=gpus, reason="own pools have a GPU for each class at least")
        tried: list[dict[str, int]] = []
        best: tuple[float, str, dict[str, int]] = (-1.0, "", {})
        division = self._divided(gpus, next(iter(self.pools)))
        while division not in tried and len(tried) < MAX_DIVISIONS:
            tried.append(division)
            rates = {name: self._rate(name, count) for name, count in division.items()}
            tightest, loosest = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
            if rates[tightest] > best[0]:
                best = rates[tightest], tightest, division
                spare = {tightest: division[tightest] + 1, loosest: division[loosest] - 1}
                moved = division | (spare if division[loosest] > 1 else {})
            for name, count in division.items():
                held = self.pools[name].highest(count)
                used = count if held is None else self._used(held).total()
                self.needs[name] = used * (rates[loosest] / rates[name] if rates[name] else 2.0)
            division = self._divided(gpus, tightest)
            division = moved if division in tried else division
        return self._point(gpus, *best)

    def _divided(self, gpus: int, rest: str) -> dict[str, int]:
        """Divide *gpus* about as the needs are; one class gets what rounding leaves."""
        share = (gpus - len(self.needs)) / sum(self.needs.values())
        found = {name: 1 + int(share * need) for name, need in self.needs.items()}
        return found | {rest: found[rest] + gpus - sum(found.values())}

    def _rate(self, name: str, gpus: int) -> float:
        """Return the rate of the whole load that a class's own pools hold their share of."""
        held = self.pools[name].highest(gpus)
        return 0.0 if held is None else held.rate / self.shares[name]

    def _used(self, held: Held) -> Counter[str]:
        return Counter(gpus_with_spares(self.inputs, held.configuration))

    def _point(
        self, gpus: int, rate: float, tightest: str, division: dict[str, int]
    ) -> CapacityPoint:
        if not rate:
            reason = self.pools[tightest].point(division[tightest]).reason
            return CapacityPoint(gpus=gpus, reason=f"own pools of {tightest}: {reason}")
        own = {
            name: self.pools[name].point(count, rate * self.shares[name])
            for name, count in division.items()
        }
        kinds: Counter[str] = Counter()
        for name, count in division.items():
            held = self.pools[name].highest(count)
            kinds += Counter() if held is None else self._used(held)
        tokens_per_s = sum(each.output_tokens_per_s for each in own.values())
        return CapacityPoint(
            gpus=gpus,
            used_gpus=kinds.total(),
            requests_per_s=rate,
            users=sum(each.users for each in own.values()),
            own=own,
            running=running_of(self.inputs, kinds, tokens_per_s),
            binds=f"{tightest} {own[tightest].binds}",
        )
