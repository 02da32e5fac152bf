"""The cheapest configuration that holds the SLO, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

from sizing.planner import bounds
from sizing.planner.candidates import (
    BoundedCandidate,
    Candidates,
    batch_limits,
    cost,
    cost_of,
    fewest_by_utilisation,
    list_candidates,
)
from sizing.planner.deployment import gpus_with_spares
from sizing.planner.error_model import step_errors
from sizing.planner.layout import Layout
from sizing.planner.local_prefill_threshold import choose_local_threshold
from sizing.planner.pool_sizing import (
    QUICK_STEP,
    PoolSizing,
    Sizes,
    estimated_sizes,
    gpus_by_confidence,
    size_mixed_pool,
    size_split_pools,
)
from sizing.planner.result import (
    Found,
    Infeasible,
    PlanVerdict,
    below_floor,
    beyond_capacity,
    far_over_budget,
    fits_nowhere,
    over_budget,
    too_many,
)
from sizing.planner.simulated_check import Simulations, SloSimulator, verify_sizes
from sizing.planner.step_models import StepModels

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from minicluster.plan import Inputs
    from sizing.planner.candidates import Candidate
    from sizing.planner.layout import LayoutShape

    Told = Callable[[Candidate], None]

__all__ = ["Found", "Infeasible", "search"]

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


def search(inputs: Inputs, *, told: Told | None = None) -> Found | Infeasible:
    """
    Find the cheapest configuration that holds the SLO at its percentile and confidence.

    Every layout has a lower bound on its cost (every pool just below the allowed utilisation);
    those whose bound is no better than what was found are left out. Of the others the cheapest by
    estimate are simulated, with steps as slow as the confidence asks for, until no replica can be
    removed (docs/model.md, eq. L2 to L4).

    Args:
        told: is called with each configuration that holds and is cheaper than those before.

    Raises:
        InputError: the scenario cannot be planned at all.
    """
    return LayoutSearch(inputs, told=told).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickLook:
    """
    A layout and batch limit after quick runs.

    Attributes:
        denied: the quick runs found no sizes that hold at an acceptable cost.
        cost: cost of `sizes`: of those that hold, else of the estimated ones.
    """

    denied: bool
    cost: float
    bounded: BoundedCandidate
    sizes: Sizes


class LayoutSearch:
    """One search with its best configuration so far."""

    def __init__(self, inputs: Inputs, *, told: Told | None = None) -> None:
        """Look up step times and list the layouts."""
        self.inputs = inputs
        self.told, self.told_cost = told, NO_LIMIT
        self.errors = step_errors(inputs, inputs.scenario.search.confidence_fraction)
        self.candidates: Candidates = list_candidates(inputs, StepModels(inputs), self.errors)
        self.simulations = Simulations(inputs)
        self.simulator = SloSimulator(self.simulations, self.errors)
        self.quick = SloSimulator(self.simulations, self.errors, precise=False)
        self._longer: dict[LayoutShape | None, float] = {}
        """Prefill replicas of a shape that held, over those that were estimated."""
        self.best: Found | None = None
        self.estimate: Candidate | None = None
        self.far_over_budget: Candidate | None = None

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
        split = self.best = None if wanted == "mixed" else self._split()
        mixed = None if wanted == "split" else self._mixed(split)
        found = [each for each in (split, mixed) if each and (each is split or each.verdicts)]
        # Of equal ones split pools, with steadier TPOT.
        best = min(found, key=lambda each: cost(self.inputs, each.candidate), default=None)
        if best is None:
            return self._infeasible()
        self.best = replace(best, other=self._comparison(best, split, mixed))
        needed = sum(gpus_with_spares(self.inputs, best.candidate).values())
        if needed > self.inputs.cluster.max_gpus:
            return over_budget(best.candidate, self.inputs, needed=needed)
        others = gpus_by_confidence(self.simulations, best)
        self.best = self._predicted(replace(self.best, gpus_by_confidence=others))
        return self.best

    def quick_split(self, near: Candidate | None, below: float, *, least: float) -> Found | None:
        """
        Return the cheapest split pools by quick runs, unverified; `None`: none cost less.

        Args:
            near: pools that probably hold: where they do, only cheaper ones are looked for.
            below: cost that pools have to stay below.
            least: cost that no pools stay below.
        """
        known = None if near is None else self._like(near)
        if known is not None and cost(self.inputs, known) < below:
            held = self.quick.verdict(known).holds
            known, below = (known, cost(self.inputs, known)) if held else (None, below)
            if known is not None and below <= least:
                return self._found(known)
        else:
            known = None
        looks = [each for each in self._looks(below / (1 + QUICK_STEP)) if not each.denied]
        best = min(looks, key=lambda each: each.cost, default=None)
        if best is not None and best.cost < below:
            known = self._as_predicted(best.bounded.slow).sized(*best.sizes)
        return None if known is None else self._found(known)

    def _like(self, near: Candidate) -> Candidate | None:
        """Return pools as those of another search; `None` where this one has no such layout."""
        found = [each for each in self.candidates.split if each.layout == near.layout]
        return found[0].limited(_batch_limit(near)).sized(*near.sizes) if found else None

    def quick_mixed(self) -> Found | None:
        """Return the cheapest aggregated pool by quick runs, unverified; `None`: none holds."""
        return self._mixed_below(NO_LIMIT, self.quick)

    def _so_far(self) -> Found:
        """Return the best within `cluster.max_gpus` so far: verified, else as estimated."""
        budget = self.inputs.cluster.max_gpus
        if self.best is not None and self.best.candidate.gpus <= budget:
            return replace(self._predicted(self.best), interrupted=True)
        near = self.estimate if self.best is None else self.best.candidate
        if near is None:
            raise KeyboardInterrupt("nothing found so far")
        if near.gpus > budget:
            nothing = f"nothing within {budget} GPUs so far, nearest: {near}"
            raise KeyboardInterrupt(f"{nothing} ({near.gpus} GPUs)")
        return replace(self._predicted(self._found(near)), interrupted=True)

    def _predicted(self, found: Found) -> Found:
        return replace(found, predicted=self.simulations.predicted(found.candidate))

    def _infeasible(self) -> Infeasible:
        unloaded = list(self.candidates.unloaded)
        if not self.candidates.split and not self.candidates.mixed:
            return below_floor(unloaded, self.inputs)
        if self.far_over_budget is not None:
            return far_over_budget(self.far_over_budget, self.inputs)
        # The fewest GPUs that could carry the load if there were no queues.
        known = (*self.candidates.split, *self.candidates.mixed)
        slow = [each.with_errors(self.errors) for each in known]
        sized = [each.sized(*fewest_by_utilisation(each, self.inputs)) for each in slow]
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
            looks = self._looks(below / (1 + QUICK_STEP), but=known)
            promised = min((each.cost for each in looks if not each.denied), default=NO_LIMIT)
            best = self._split_of([each for each in looks if best is None or not each.denied], best)
            if best is None or cost(self.inputs, best.candidate) <= promised:
                break
            below = cost(self.inputs, best.candidate)
            known |= {each.bounded.slow.layout for each in looks}
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
        for growth in (1 + QUICK_STEP, NO_LIMIT):
            for look in tuple(looks):
                below = NO_LIMIT if best is None else cost(self.inputs, best.candidate)
                if look.cost * ESTIMATE_TOLERANCE >= below:
                    continue
                if look.denied and (below <= cheapest or growth < NO_LIMIT):
                    continue
                following = min((each for each in costs if each > look.cost), default=look.cost)
                below = min(below, following * growth)
                candidate = self._size(look.bounded, look.sizes, self.simulator, below)
                found = None if candidate is None else self._verified(candidate, below)
                if found is not None:
                    best = self.best = found
                    self._tell(found)
                    self._learn(look.bounded, look.sizes, found.candidate.sizes)
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
        todo = [each for each in self._estimated if each[0].slow.layout not in but]
        if cheapest < NO_LIMIT:
            worth = 1.0
            todo.sort(key=lambda each: cost(self.inputs, each[0].slow.sized(*each[1])))
        for bounded, sizes in todo:
            layout, below = bounded.slow.layout, cheapest * (1 + QUICK_STEP)
            shape = layout.prefill
            guess = ceil(sizes[0] * self._longer.get(shape, 1)), sizes[1]
            estimate = cost(self.inputs, bounded.slow.sized(*guess))
            least = estimate if shape in self._longer else estimate * ESTIMATE_TOLERANCE
            # What costs as much as another layout that holds, or a larger batch limit, is no help.
            if least >= cheapest * worth or estimate >= held.get(layout, NO_LIMIT):
                continue
            # Beyond the finalists: what costs less, its prefill pool being known from one of them.
            promising = cheapest == NO_LIMIT or (shape in self._longer and estimate < cheapest)
            if tried >= (MOST_TRIED if promising else FINALISTS):
                continue
            tried += 1
            found = self._size(bounded, guess, self.quick, below)
            held_by = guess if found is None else found.sizes
            taken = cost(self.inputs, bounded.slow.sized(*held_by))
            if found is not None:
                cheapest, held[layout] = min(cheapest, taken), taken
                self._learn(bounded, guess, held_by)
            if found is not None or tried <= FINALISTS:
                look = QuickLook(denied=found is None, cost=taken, bounded=bounded, sizes=held_by)
                looks.append(look)
        return looks

    def _learn(self, bounded: BoundedCandidate, guess: Sizes, held: Sizes) -> None:
        """Note how many prefill replicas held where so many were guessed."""
        shape = bounded.slow.layout.prefill
        self._longer[shape] = self._longer.get(shape, 1.0) * held[0] / guess[0]

    def _size(
        self, bounded: BoundedCandidate, guess: Sizes, simulator: SloSimulator, below: float
    ) -> Candidate | None:
        """Size the split pools of one layout and limit; `None` where they cost *below* or more."""
        candidate = self._as_predicted(bounded.slow)
        chosen = candidate.sized(*guess)
        self.estimate = self.estimate or chosen
        if bounded.bound >= below or cost(self.inputs, chosen) * ESTIMATE_TOLERANCE >= below:
            return None
        if chosen.gpus > self._max_gpus:
            self.far_over_budget = self.far_over_budget or chosen
            return None
        sizing = PoolSizing(
            inputs=self.inputs,
            simulator=simulator,
            candidate=candidate,
            lowest=bounded.lowest,
            below=below,
            max_gpus=self._max_gpus,
        )
        return size_split_pools(sizing, guess)

    @property
    def _max_gpus(self) -> int:
        return SIMULATED_BUDGETS * self.inputs.cluster.max_gpus

    @cached_property
    def _estimated(self) -> list[tuple[BoundedCandidate, Sizes]]:
        """
        Return layouts and batch limits with their estimated sizes, cheapest first.

        The estimates err in the prefill queue, but rank what stands behind the same prefill pool:
        the first of each prefill shape come before the others. Those whose bound is above an
        estimate come last, with their fewest replicas: that estimate may be too low.
        """
        slow = [each.with_errors(self.errors) for each in self.candidates.split]
        used = {each.layout: check.ratio for check, each in self.candidates.unloaded}
        todo = sorted(
            (bounded for each in slow for bounded in batch_limits(each, self.inputs)),
            key=lambda each: (
                each.bound / (SLACK_CEILING - used[each.slow.layout]),
                each.slow.layout.order,
                -_batch_limit(each.slow),
            ),
        )
        found: list[tuple[float, BoundedCandidate, Sizes]] = []
        dearer: list[tuple[BoundedCandidate, Sizes]] = []
        below = NO_LIMIT
        max_gpus = MAX_BUDGETS * self.inputs.cluster.max_gpus
        for bounded in todo:
            lowest_gpus = bounded.slow.sized(*bounded.lowest).gpus
            if lowest_gpus > max_gpus:
                continue
            if bounded.bound * ESTIMATE_TOLERANCE >= below:
                dearer.append((bounded, bounded.lowest))
                continue
            sizes = estimated_sizes(
                self._as_predicted(bounded.slow), self.inputs, self.errors, bounded.lowest
            )
            estimate = cost(self.inputs, bounded.slow.sized(*sizes))
            below = min(below, estimate)
            slack = SLACK_CEILING - used[bounded.slow.layout]
            found.append((estimate / slack, bounded, sizes))
        found.sort(key=lambda each: each[0])
        firsts: set[LayoutShape | None] = set()
        first: list[tuple[BoundedCandidate, Sizes]] = []
        later: list[tuple[BoundedCandidate, Sizes]] = []
        for _, bounded, sizes in found:
            prefill = bounded.slow.layout.prefill
            (later if prefill in firsts else first).append((bounded, sizes))
            firsts.add(prefill)
        return first + later + dearer

    def _as_predicted(self, slow: Candidate) -> Candidate:
        """Return a slow candidate with step times as predicted, its batch limit kept."""
        known = (*self.candidates.split, *self.candidates.mixed)
        return next(each for each in known if each.layout == slow.layout).limited(
            _batch_limit(slow)
        )

    def _verified(self, chosen: Candidate, below: float) -> Found | None:
        verified = verify_sizes(self.inputs, self.simulator, chosen, below)
        return None if verified is None else self._found(*verified)

    def _tell(self, found: Found) -> None:
        """Tell of a configuration that holds, if it is the cheapest so far."""
        taken = cost(self.inputs, found.candidate)
        if self.told is not None and taken < self.told_cost:
            self.told_cost = taken
            self.told(found.candidate)

    def _found(self, chosen: Candidate, verdicts: tuple[PlanVerdict, ...] = ()) -> Found:
        return Found(candidate=chosen, errors=self.errors, verdicts=verdicts)

    # --- aggregated pools

    def _mixed(self, split: Found | None) -> Found | None:
        """
        Find the cheapest aggregated pool that costs less than twice the split ones.

        Quick runs choose the layout; where it may be cheaper than the split pools, precise runs
        verify it.
        """
        below = NO_LIMIT if split is None else 2 * cost(self.inputs, split.candidate)
        found = self._mixed_below(below, self.quick)
        if found is None or 2 * cost(self.inputs, found.candidate) * (1 - QUICK_STEP) >= below:
            return found
        return self._mixed_below(below, self.simulator, first=found.candidate.layout)

    def _mixed_below(
        self, below: float, simulator: SloSimulator, *, first: Layout | None = None
    ) -> Found | None:
        """
        Size the aggregated layouts with the shortest steps for the money below a cost.

        A few in a row that cost no less end it, more where none has held so far; a precise
        *simulator* also verifies one.

        Args:
            first: layout that probably costs least; the others are then soon ruled out.
        """
        best: Found | None = None
        slow = [each.with_errors(self.errors) for each in self.candidates.mixed]
        lowest = {each.layout: fewest_by_utilisation(each, self.inputs) for each in slow}

        def order(each: Candidate) -> tuple[Any, ...]:
            return each.layout != first, self._mixed_pace_s(each, below), each.layout.order

        failed = 0
        for each in sorted(slow, key=order):
            if failed >= (MOST_TRIED if best is None else FINALISTS):
                break
            if cost(self.inputs, each.sized(*lowest[each.layout])) >= below:
                continue
            failed += 1
            sizing = PoolSizing(
                inputs=self.inputs,
                simulator=simulator,
                candidate=self._as_predicted(each),
                lowest=lowest[each.layout],
                below=below,
                max_gpus=self._max_gpus,
            )
            candidate = size_mixed_pool(sizing)
            if candidate is None:
                continue
            found = (
                self._verified(candidate, below) if simulator.precise else self._found(candidate)
            )
            if found is not None:
                if simulator.precise:
                    self._tell(found)
                best, below, failed = found, cost(self.inputs, found.candidate), 0
        return best

    def _mixed_pace_s(self, slow: Candidate, below: float) -> float:
        """Return the seconds per token (T6) of the most replicas that may be tried below a cost."""
        shape = slow.layout.decode
        most = min(below / cost_of(self.inputs, shape), self._max_gpus / shape.gpus)
        pace_s, _ = bounds.steady_decode(slow.sized(0, max(1, int(most))).tandem, split=False)
        return pace_s

    def _comparison(self, best: Found, split: Found | None, mixed: Found | None) -> str:
        """Return what pools of the other kind would take; empty where they were not searched."""
        if self.inputs.scenario.search.pools != "any" or not self.candidates.mixed:
            return ""
        if best is mixed:
            if split is None:
                return "split pools do not hold the SLO"
            return f"split pools need {split.candidate.gpus} GPUs ({split.candidate})"
        if mixed is None:
            return "aggregated pools do not hold the SLO with twice as many GPUs"
        return f"aggregated pools need {mixed.candidate.gpus} GPUs ({mixed.candidate})"


def _batch_limit(candidate: Candidate) -> int:
    return candidate.tandem.decode.max_batch_size
