"""The cheapest configuration that holds the SLO, or why there is none."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

from sizing.planner import bounds
from sizing.planner.candidates import (
    Candidates,
    batch_limits,
    fewest_by_utilisation,
    list_candidates,
)
from sizing.planner.configuration import Configuration, cost, cost_of
from sizing.planner.deployment import gpus_with_spares
from sizing.planner.edge import RESOLUTION
from sizing.planner.error_model import step_errors, validation
from sizing.planner.growth import edge
from sizing.planner.layout import Layout
from sizing.planner.pool_sizing import (
    PoolSizing,
    choose_local_threshold,
    estimated_sizes,
    size_mixed_pool,
    size_split_pools,
)
from sizing.planner.result import (
    Infeasible,
    below_floor,
    beyond_capacity,
    far_over_budget,
    fits_nowhere,
    over_budget,
    too_many,
)
from sizing.planner.simulated_check import Found, Held, PlanVerdict, Simulations, verified
from sizing.planner.step_models import StepModels
from sizing.planner.workers import NO_WORKERS, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from minicluster.plan import Inputs
    from sizing.planner.error_model import StepErrors
    from sizing.planner.layout import LayoutShape
    from sizing.planner.simulated_check import SloRun
    from sizing.planner.step_models import Steps

    Told = Callable[[Configuration], None]
    QuickMixed = tuple[Configuration | None, dict[object, SloRun]]
    """Aggregated pools that hold in quick runs, and these runs."""

FINALISTS = 6
"""Layouts and batch limits that are simulated: those with the cheapest estimates."""

MOST_TRIED = 16
"""The same where no size of any has held yet, and of those that promise to cost less."""

ROUNDS = 3
"""Times that layouts are looked at: again where precise runs end dearer than the quick ones."""

MAX_BUDGETS = 16
"""Multiple of `cluster.max_gpus` up to which the sizes of pools are estimated."""

SLACK_CEILING = 1.05
"""Layouts are sized in the order of cost bound / (1.05 - unloaded latency / SLO limit)."""

ESTIMATE_TOLERANCE = 0.9
"""Factor on an estimated cost by which simulation may turn out cheaper."""

WORTH_A_LOOK = 1.2
"""Cost, over the cheapest pools that hold in a quick run, up to which layouts have one, too."""

NO_LIMIT = float("inf")
"""Cost below which every configuration is."""

SIMULATED_BUDGETS = 4
"""Multiple of `cluster.max_gpus` up to which configurations are simulated; above it: infeasible."""


def search(
    inputs: Inputs, *, told: Told | None = None, workers: Workers = NO_WORKERS
) -> Found | Infeasible:
    """
    Find the cheapest configuration that holds the SLO at its percentile and confidence.

    Every layout has a lower bound on its cost (every pool just below the allowed utilisation);
    those whose bound is no better than what was found are left out. Of the others the cheapest by
    estimate are simulated, with steps as slow as the confidence asks for, until no replica can be
    removed (docs/model.md, eq. L2 to L4).

    Args:
        told: is called with each configuration that holds and is cheaper than those before.
        workers: processes beside this one; they do not change what is found.

    Raises:
        InputError: the scenario cannot be planned at all.
    """
    return LayoutSearch(inputs, told=told, workers=workers).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickLook:
    """
    A layout and batch limit after quick runs.

    Attributes:
        denied: the quick runs found no sizes that hold at an acceptable cost.
        lowest: the fewest replicas that may hold.
        sized: those that hold, else as estimated.
        cost: cost of `sized`.
    """

    denied: bool
    lowest: Configuration
    sized: Configuration
    cost: float


class LayoutSearch:
    """One search with its best configuration so far."""

    def __init__(
        self, inputs: Inputs, *, told: Told | None = None, workers: Workers = NO_WORKERS
    ) -> None:
        """Look up step times and list the layouts."""
        self.inputs = inputs
        self.told, self.told_cost = told, NO_LIMIT
        self.errors = step_errors(inputs, inputs.scenario.search.confidence_fraction)
        self.models = StepModels(inputs)
        self.candidates: Candidates = list_candidates(self.models, self.errors)
        self.workers = workers
        self.simulations = Simulations(self.models, workers=workers)
        self._longer: dict[LayoutShape | None, float] = {}
        """Prefill replicas of a shape that held, over those that were estimated."""
        self.best: Found | None = None
        self.estimate: Configuration | None = None
        self.far_over_budget: Configuration | None = None

    def run(self) -> Found | Infeasible:
        """Search; after an interrupt, return the best configuration so far, marked as such."""
        if not self.candidates.unloaded:
            return fits_nowhere(self.inputs, list(self.candidates.unfit))
        try:
            return self._result()
        except KeyboardInterrupt:
            return self._so_far()

    def _result(self) -> Found | Infeasible:
        wanted = self.inputs.scenario.search.pools
        quick_mixed = self.workers.later(_quick_mixed, self._apart(), self._mixed_bound)
        split = self.best = None if wanted == "mixed" else self._split()
        mixed = None if wanted == "split" else self._mixed(split, quick_mixed)
        found = [each for each in (split, mixed) if each and (each is split or each.verdicts)]
        best = min(found, key=self._order, default=None)
        if best is None:
            return self._infeasible()
        self.best = best
        needed = sum(gpus_with_spares(self.inputs, best.configuration).values())
        if needed > self.inputs.cluster.max_gpus:
            return over_budget(best.configuration, self.inputs, needed=needed)
        best, *equal = sorted(self._grown(found, self._cost(best)), key=self._order)
        other = equal[0] if equal else mixed if best.configuration.last == "decode" else split
        self.best = self._predicted(replace(best, other=self._comparison(best, other)))
        return self.best

    def _order(self, one: Found) -> tuple[float, bool, float]:
        """The cheapest, of equal ones the measured kind, then that with more headroom."""
        growth = 0.0 if one.growth is None else one.growth.rate
        return self._cost(one), not self._measured(one), -growth

    def _measured(self, found: Found) -> bool:
        split = found.configuration.layout.prefill is not None
        return validation(self.inputs, split=split).num_rows > 0

    def _grown(self, found: list[Found], lowest: float) -> list[Found]:
        """Return the pools of the lowest cost; of several also how far their load may grow."""
        equal = [one for one in found if self._cost(one) <= lowest]
        if len(equal) == 1:
            return equal
        asked = [
            self.workers.later(_growth, self.inputs, self.models.known(each), each, self.errors)
            for each in (one.configuration for one in equal)
        ]
        # The last is found here, while a worker finds another.
        todo = zip(reversed(equal), reversed(asked), strict=True)
        return [replace(one, growth=growth()) for one, growth in todo]

    def quick_split(
        self, near: Configuration | None, below: float, *, least: float
    ) -> Found | None:
        """
        Return the cheapest split pools by quick runs, unverified; `None`: none cost less.

        Args:
            near: pools of another search that probably hold: where they do, only cheaper ones are
                looked for.
            below: cost that pools have to stay below.
            least: cost that no pools stay below.
        """
        known = next(
            (
                each.limited(near.batch_limit).sized(near.replicas)
                for each in self.candidates.split
                if near is not None and each.layout == near.layout
            ),
            None,
        )
        if known is not None and cost(self.inputs, known) >= below:
            known = None
        if known is not None:
            if self.simulations.holds(known, self.errors, quick=True).holds:
                below = cost(self.inputs, known)
                if below <= least:
                    return self._found(known)
            else:
                known = None
        looks = [each for each in self._looks(below / (1 + RESOLUTION)) if not each.denied]
        best = min(looks, key=lambda each: each.cost, default=None)
        if best is not None and best.cost < below:
            known = best.sized
        return None if known is None else self._found(known)

    def at_rate(self, simulations: Simulations) -> LayoutSearch:
        """Return a search of the same candidates at the rate of *simulations*."""
        search = copy(self)
        search.simulations, search.models = simulations, simulations.models
        search.inputs = replace(simulations.inputs, cluster=self.inputs.cluster)
        search._longer, search.estimate, search.told = {}, None, None  # noqa: SLF001  (its own)
        search.__dict__.pop("estimated", None)
        return search

    def quickest(self, limit: float) -> Configuration | None:
        """Return the cheapest configuration by quick runs, unverified; `None`: none below."""
        split = self.quick_split(None, limit, least=0.0)
        mixed = self._mixed_below(limit if split is None else self._cost(split), quick=True)
        best = mixed or split
        return None if best is None else best.configuration

    def _cost(self, found: Found) -> float:
        return cost(self.inputs, found.configuration)

    def quick_mixed(self) -> Found | None:
        """Return the cheapest aggregated pool by quick runs, unverified; `None`: none holds."""
        return self._mixed_below(NO_LIMIT, quick=True)

    def _so_far(self) -> Found:
        """Return the best within `cluster.max_gpus` so far: verified, else as estimated."""
        budget = self.inputs.cluster.max_gpus
        if self.best is not None and self.best.configuration.gpus <= budget:
            return replace(self._predicted(self.best), interrupted=True)
        near = self.estimate if self.best is None else self.best.configuration
        if near is None:
            raise KeyboardInterrupt("nothing found so far")
        if near.gpus > budget:
            nothing = f"nothing within {budget} GPUs so far, nearest: {near}"
            raise KeyboardInterrupt(f"{nothing} ({near.gpus} GPUs)")
        return replace(self._predicted(self._found(near)), interrupted=True)

    def _predicted(self, found: Found) -> Found:
        return replace(found, predicted=self.simulations.predicted(found.configuration))

    def _infeasible(self) -> Infeasible:
        unloaded = list(self.candidates.unloaded)
        if not self.candidates.split and not self.candidates.mixed:
            return below_floor(unloaded, self.inputs)
        if self.far_over_budget is not None:
            return far_over_budget(self.far_over_budget, self.inputs)
        # The fewest GPUs that could carry the load if there were no queues.
        known = (*self.candidates.split, *self.candidates.mixed)
        sized = [fewest_by_utilisation(self.models, each, self.errors) for each in known]
        lowest = min(sized, key=lambda each: (each.gpus, each.layout.order))
        if lowest.gpus > self.inputs.cluster.max_gpus:
            return beyond_capacity(lowest, self.inputs)
        return too_many(unloaded, self.inputs, max_gpus=self._max_gpus)

    # --- split pools

    def _split(self) -> Found | None:
        """
        Find the cheapest split pools: precise runs start where quick ones end.

        Where these end dearer than the quick ones had it, more layouts are tried below that.
        """
        best: Found | None = None
        below, known = NO_LIMIT, set[Layout]()
        for _ in range(ROUNDS):
            looks = self._looks(below / (1 + RESOLUTION), but=known)
            promised = min((each.cost for each in looks if not each.denied), default=NO_LIMIT)
            best = self._split_of([each for each in looks if best is None or not each.denied], best)
            if best is None or cost(self.inputs, best.configuration) <= promised:
                break
            below = cost(self.inputs, best.configuration)
            known |= {each.lowest.layout for each in looks}
        return None if best is None else choose_local_threshold(self.simulations, best)

    def _split_of(self, looks: list[QuickLook], best: Found | None = None) -> Found | None:
        """
        Return the cheapest pools by precise runs; *best* where none cost less.

        No layout grows beyond the sizes of the next one's quick run while that may hold. What a
        quick run denied, perhaps by chance, is tried only where the others turn out dearer than it
        said.
        """
        looks = sorted(looks, key=lambda each: (each.denied, each.cost))
        costs = [each.cost for each in looks if not each.denied]
        cheapest = min(costs, default=NO_LIMIT)
        for growth in (1 + RESOLUTION, NO_LIMIT):
            for look in tuple(looks):
                below = NO_LIMIT if best is None else cost(self.inputs, best.configuration)
                if look.cost * ESTIMATE_TOLERANCE >= below:
                    continue
                if look.denied and (below <= cheapest or growth < NO_LIMIT):
                    continue
                following = min((each for each in costs if each > look.cost), default=look.cost)
                below = min(below, following * growth)
                sized = self._size(look.lowest, look.sized, below, quick=False)
                found = None if sized is None else self._verified(sized, below)
                if found is not None:
                    best = self.best = found
                    self._tell(found)
                    self._learn(look.sized, found.configuration)
                    looks.remove(look)
        return best

    def _looks(
        self, cheapest: float = NO_LIMIT, *, but: Collection[Layout] = ()
    ) -> list[QuickLook]:
        """
        Estimate the size of every layout and batch limit, and size the cheapest quickly.

        While no size of any holds, more are tried. Where pools are known to hold, only layouts that
        may cost less are, the cheapest estimates first.

        Args:
            cheapest: cost of pools that are known to hold.
            but: layouts that are left out.
        """
        looks: list[QuickLook] = []
        worth = WORTH_A_LOOK
        held, tried = dict[Layout, float](), 0
        todo = [each for each in self.estimated if each[0].layout not in but]
        if cheapest < NO_LIMIT:
            worth = 1.0
            todo.sort(key=lambda each: cost(self.inputs, each[1]))
        for lowest, estimated in todo:
            layout, below = lowest.layout, cheapest * (1 + RESOLUTION)
            shape = layout.prefill
            longer = ceil(estimated.replicas["prefill"] * self._longer.get(shape, 1))
            guess = estimated.sized({"prefill": longer})
            estimate = cost(self.inputs, guess)
            least = estimate if shape in self._longer else estimate * ESTIMATE_TOLERANCE
            # What costs as much as another layout that holds, or a larger batch limit, is no help.
            if least >= cheapest * worth or estimate >= held.get(layout, NO_LIMIT):
                continue
            # Beyond the finalists: what costs less, its prefill pool being known from one of them.
            promising = cheapest == NO_LIMIT or (shape in self._longer and estimate < cheapest)
            if tried >= (MOST_TRIED if promising else FINALISTS):
                continue
            tried += 1
            found = self._size(lowest, guess, below, quick=True)
            sized = found or guess
            taken = cost(self.inputs, sized)
            if found is not None:
                cheapest, held[layout] = min(cheapest, taken), taken
                self._learn(guess, found)
            if found is not None or tried <= FINALISTS:
                looks.append(
                    QuickLook(denied=found is None, lowest=lowest, sized=sized, cost=taken)
                )
        return looks

    def _learn(self, guess: Configuration, held: Configuration) -> None:
        """Note how many prefill replicas held where so many were guessed."""
        shape, longer = guess.layout.prefill, held.replicas["prefill"] / guess.replicas["prefill"]
        self._longer[shape] = self._longer.get(shape, 1.0) * longer

    def _size(
        self, lowest: Configuration, guess: Configuration, below: float, *, quick: bool
    ) -> Configuration | None:
        """Size the split pools of one layout and limit; `None` where they cost *below* or more."""
        self.estimate = self.estimate or guess
        tolerated = cost(self.inputs, guess) * ESTIMATE_TOLERANCE
        if max(cost(self.inputs, lowest), tolerated) >= below:
            return None
        if guess.gpus > self._max_gpus:
            self.far_over_budget = self.far_over_budget or guess
            return None
        return size_split_pools(self._sizing(lowest, below, quick=quick), guess)

    def _sizing(self, lowest: Configuration, below: float, *, quick: bool) -> PoolSizing:
        return PoolSizing(
            simulations=self.simulations,
            errors=self.errors,
            quick=quick,
            lowest=lowest,
            below=below,
            max_gpus=self._max_gpus,
        )

    @property
    def _max_gpus(self) -> int:
        return SIMULATED_BUDGETS * self.inputs.cluster.max_gpus

    @cached_property
    def estimated(self) -> list[tuple[Configuration, Configuration]]:
        """
        Return the fewest replicas of layouts and batch limits with their estimates, cheapest first.

        The estimates err in the prefill queue, but rank what stands behind the same prefill pool:
        the first of each prefill shape come before the others. Those whose fewest replicas cost
        more than an estimate come last, with these: that estimate may be too low.
        """
        slack = {
            each.layout: SLACK_CEILING - check.ratio for check, each in self.candidates.unloaded
        }
        todo = sorted(
            (
                lowest
                for each in self.candidates.split
                for lowest in batch_limits(self.models, each, self.errors)
            ),
            key=lambda each: (
                cost(self.inputs, each) / slack[each.layout],
                each.layout.order,
                -each.batch_limit,
            ),
        )
        found: list[tuple[float, Configuration, Configuration]] = []
        dearer: list[tuple[Configuration, Configuration]] = []
        below = NO_LIMIT
        max_gpus = MAX_BUDGETS * self.inputs.cluster.max_gpus
        for lowest in todo:
            if lowest.gpus > max_gpus:
                continue
            if cost(self.inputs, lowest) * ESTIMATE_TOLERANCE >= below:
                dearer.append((lowest, lowest))
                continue
            estimated = estimated_sizes(self.models, lowest, self.errors)
            estimate = cost(self.inputs, estimated)
            below = min(below, estimate)
            found.append((estimate / slack[lowest.layout], lowest, estimated))
        found.sort(key=lambda each: each[0])
        shapes: set[LayoutShape | None] = set()
        first: list[tuple[Configuration, Configuration]] = []
        later: list[tuple[Configuration, Configuration]] = []
        for _, lowest, estimated in found:
            prefill = lowest.layout.prefill
            (later if prefill in shapes else first).append((lowest, estimated))
            shapes.add(prefill)
        return first + later + dearer

    def _verified(self, chosen: Configuration, below: float) -> Found | None:
        found = verified(self.simulations, chosen, self.errors, below)
        return None if found is None else self._found(*found)

    def _tell(self, found: Found) -> None:
        """Tell of a configuration that holds, if it is the cheapest so far."""
        taken = cost(self.inputs, found.configuration)
        if self.told is not None and taken < self.told_cost:
            self.told_cost = taken
            self.told(found.configuration)

    def _found(self, chosen: Configuration, verdicts: tuple[PlanVerdict, ...] = ()) -> Found:
        return Found(
            configuration=chosen, models=self.models, errors=self.errors, verdicts=verdicts
        )

    # --- aggregated pools

    @property
    def _mixed_bound(self) -> float:
        """Cost that aggregated pools are looked for below while split ones are not yet known."""
        estimates = (cost(self.inputs, estimated) for _, estimated in self.estimated)
        return 2 * min(estimates, default=NO_LIMIT)

    def _apart(self) -> LayoutSearch:
        """Return a search of the same candidates that shares no simulation with this one."""
        search = self.at_rate(Simulations(self.models))
        search.best, search.workers = None, NO_WORKERS
        return search

    def _mixed(self, split: Found | None, quick: Callable[[], QuickMixed]) -> Found | None:
        """
        Find the cheapest aggregated pool that costs less than twice the split ones.

        Quick runs choose the layout; where it may be cheaper than the split pools, precise runs
        verify it.
        """
        below = NO_LIMIT if split is None else 2 * cost(self.inputs, split.configuration)
        chosen, runs = quick()
        self.simulations.runs.update(runs)
        found = (
            None if chosen is None or cost(self.inputs, chosen) >= below else self._found(chosen)
        )
        if chosen is None and below > self._mixed_bound:
            found = self._mixed_below(below, quick=True)
        if found is None or 2 * cost(self.inputs, found.configuration) * (1 - RESOLUTION) >= below:
            return found
        return self._mixed_below(below, quick=False, first=found.configuration.layout)

    def _mixed_below(
        self, below: float, *, quick: bool, first: Layout | None = None
    ) -> Found | None:
        """
        Size the aggregated layouts with the shortest steps for the money below a cost.

        A few in a row that cost no less end it, more where none has held so far.

        Args:
            quick: whether one short run decides; else what holds is verified, too.
            first: layout that probably costs least; the others are then soon ruled out.
        """
        best: Found | None = None
        todo = [
            fewest_by_utilisation(self.models, each, self.errors) for each in self.candidates.mixed
        ]

        def order(each: Configuration) -> tuple[Any, ...]:
            return each.layout != first, self._mixed_pace_s(each, below), each.layout.order

        failed = 0
        for lowest in sorted(todo, key=order):
            if failed >= (MOST_TRIED if best is None else FINALISTS):
                break
            if cost(self.inputs, lowest) >= below:
                continue
            failed += 1
            sized = size_mixed_pool(self._sizing(lowest, below, quick=quick))
            if sized is None:
                continue
            found = self._found(sized) if quick else self._verified(sized, below)
            if found is not None:
                if not quick:
                    self._tell(found)
                best, below, failed = found, cost(self.inputs, found.configuration), 0
        return best

    def _mixed_pace_s(self, lowest: Configuration, below: float) -> float:
        """Return the seconds per token (T6) of the most replicas that may be tried below a cost."""
        shape = lowest.layout.decode
        most = min(below / cost_of(self.inputs, shape), self._max_gpus / shape.gpus)
        load = self.models.load(lowest, self.errors)
        pace_s, _ = bounds.steady_decode(load, max(1, int(most)) * shape.lanes)
        return pace_s

    def _comparison(self, best: Found, other: Found | None) -> str:
        """Return what pools of the other kind would take; empty where they were not searched."""
        if self.inputs.scenario.search.pools != "any" or not self.candidates.mixed:
            return ""
        aggregated = best.configuration.last == "mixed"
        kind = "split pools" if aggregated else "aggregated pools"
        if other is None:
            more = "" if aggregated else " with twice as many GPUs"
            return f"{kind} do not hold the SLO{more}"
        chosen, gpus = other.configuration, other.configuration.gpus
        if other.growth is None:
            return f"{kind} need {gpus} GPUs ({chosen})"
        same = "the same" if gpus == best.configuration.gpus else "at the same cost"
        factor = other.growth.rate / self.inputs.scenario.workload.requests_per_s
        measured = "" if self._measured(other) else ", none measured"
        return f"{kind}: {same} {gpus} GPUs ({chosen}), headroom {factor:.2f}{measured}"


def _quick_mixed(search: LayoutSearch, below: float) -> QuickMixed:
    found = search._mixed_below(below, quick=True)  # noqa: SLF001  (its own question)
    return None if found is None else found.configuration, search.simulations.runs


def _growth(inputs: Inputs, steps: Steps, chosen: Configuration, errors: StepErrors) -> Held:
    simulations = Simulations(StepModels(inputs, steps))
    return edge(simulations, errors, chosen, above=inputs.scenario.workload.requests_per_s)
