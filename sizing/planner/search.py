"""The cheapest configuration that holds the SLO, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sizing.planner.answer import (
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
from sizing.planner.closed_form import MOST_BUDGETS, Sized, fewest, fewest_by_utilisation, limits
from sizing.planner.conditional import conditional
from sizing.planner.evidence import step_errors
from sizing.planner.levels import gpus_at
from sizing.planner.objective import cost, cost_of
from sizing.planner.settle import FINE, PoolSizing, mixed_lowest, settle_mixed, settle_split
from sizing.planner.spares import spare_replicas
from sizing.planner.starts import Starts, starting_points
from sizing.planner.step_models import StepModels
from sizing.planner.trial import SimulationBudget, Trials, confirmed
from sizing.queueing.forecast import forecast

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.candidate import Candidate
    from sizing.planner.layout import LayoutShape

__all__ = ["Found", "Infeasible", "search"]

FINALISTS = 4
"""Layouts and limits that are simulated, cheapest forecast first."""

NEARLY = 1.05
"""Layouts are sized first that cost little and leave a lone request time: bound / (1.05 - share
of the limit that it takes)."""

CHEAPER = 1 - 1e-6
"""Share of the best cost that the next layout may have: of equal ones the first counts."""

CLOSE = 0.95
"""Share of the cost by closed forms that a simulation may find to be enough."""

FREE = float("inf")

BUDGETS = 4
"""Times `cluster.max_gpus` up to which configurations are simulated: what takes more is a no."""


def search(inputs: Inputs) -> Found | Infeasible:
    """
    Find the cheapest configuration that holds the SLO at its percentile and confidence.

    Every layout has a lower bound on its cost (every pool just below the allowed utilisation);
    those whose bound is no better than what was found are left out. Closed forms size the others;
    the cheapest are simulated, with steps as slow as the
    confidence asks for, until no replica can be spared (docs/model.md, eq. L2 to L4). On measured
    machines closed forms alone decide.

    Raises:
        InputError: the scenario cannot be planned at all.
    """
    return LayoutSearch(inputs).run()


class LayoutSearch:
    """One search, with the best configuration so far."""

    def __init__(self, inputs: Inputs) -> None:
        """Look up step times and list the layouts."""
        self.inputs = inputs
        self.errors = step_errors(inputs, inputs.scenario.search.confidence_fraction)
        self.starts: Starts = starting_points(inputs, StepModels(inputs), self.errors)
        self.work = SimulationBudget()
        self.trials = Trials(inputs, self.errors, work=self.work)
        self.best: Found | None = None
        self.sketch: Found | None = None
        self.beyond: Candidate | None = None

    def run(self) -> Found | Infeasible:
        """Search; what an interrupt leaves is the best so far, marked as such."""
        if not self.starts.alone:
            return fits_nowhere(self.inputs, list(self.starts.unfit))
        try:
            return self._answer()
        except KeyboardInterrupt:
            return self._so_far()

    def _answer(self) -> Found | Infeasible:
        """Search split pools, then mixed ones, and take what was asked for."""
        wanted = self.inputs.scenario.search.pools
        split = self.best = None if wanted == "mixed" else self._split()
        mixed = None if wanted == "split" else self._mixed(split)
        best = self._better(split, mixed)
        if best is None:
            return self._none()
        self.best = replace(best, other=self._comparison(best, split, mixed))
        shapes = best.candidate.layout.shapes
        spares = spare_replicas(self.inputs, best.candidate)
        needed = best.candidate.gpus + sum(n * shapes[role].gpus for role, n in spares.items())
        if needed > self.inputs.cluster.max_gpus:
            return over_budget(best.candidate, self.inputs, needed=needed)
        self.best = replace(self.best, gpus_at=gpus_at(self.inputs, best, self.work))
        return self.best

    def _so_far(self) -> Found:
        """Return what an interrupt leaves within the budget: proven, or else by closed forms."""
        budget = self.inputs.cluster.max_gpus
        for found in (self.best, self.sketch):
            if found is not None and found.candidate.gpus <= budget:
                return replace(found, interrupted=True)
            if found is not None:
                near = f"nothing within {budget} GPUs so far, nearest: {found.candidate}"
                raise KeyboardInterrupt(f"{near} ({found.candidate.gpus} GPUs)")
        raise KeyboardInterrupt("nothing found so far")

    def _none(self) -> Infeasible:
        """Say why nothing holds."""
        alone = list(self.starts.alone)
        if not self.starts.split and not self.starts.mixed:
            return below_floor(alone, self.inputs)
        if self.beyond is not None:
            return far_over_budget(self.beyond, self.inputs)
        lowest = self._lowest()
        if lowest.gpus > self.inputs.cluster.max_gpus:
            return beyond_capacity(lowest, self.inputs)
        return too_many(alone, self.inputs, most_gpus=MOST_BUDGETS * self.inputs.cluster.max_gpus)

    def _lowest(self) -> Candidate:
        """Return the fewest GPUs that could carry the load at all, were there no queues."""
        split = [start.off_by(self.errors) for start in self.starts.split]
        both = [start.off_by(self.errors) for start in self.starts.mixed]
        sized = [
            *(start.sized(*fewest_by_utilisation(start, self.inputs)) for start in split),
            *(start.sized(0, mixed_lowest(self.inputs, start)) for start in both),
        ]
        return min(sized, key=lambda each: (each.gpus, each.layout.order))

    def _better(self, split: Found | None, mixed: Found | None) -> Found | None:
        """Take the cheaper that is proven; of equal ones split pools, whose pace is steadier."""
        found = [each for each in (split, mixed) if each and (each is split or each.verdicts)]
        return min(found, key=lambda each: cost(self.inputs, each.candidate), default=None)

    # --- split pools

    def _split(self) -> Found | None:
        """Size every layout by closed forms, then simulate the cheapest."""
        sized = self._sized()
        if self.inputs.calibration is not None or self.inputs.gpu.kind == "cpu":
            return self._by_forecast(sized)
        self.sketch = self._by_forecast(sized)
        best: Found | None = None
        for start, guess in sized[:FINALISTS]:
            below = FREE if best is None else cost(self.inputs, best.candidate)
            chosen = start.slow.sized(*guess)
            if start.bound >= below or cost(self.inputs, chosen) * CLOSE >= below:
                continue
            if chosen.gpus > self._most_gpus:
                self.beyond = self.beyond or chosen
                continue
            one = PoolSizing(
                inputs=self.inputs,
                trials=self.trials,
                start=self._as_predicted(start.slow),
                lowest=start.lowest,
                below=below,
                most_gpus=self._most_gpus,
            )
            settled = settle_split(one, guess)
            found = None if settled is None else self._confirmed(settled, below)
            if found is not None:
                best = self.best = found
        return None if best is None else conditional(self.inputs, best, self.work)

    @property
    def _most_gpus(self) -> int:
        """GPUs up to which it is worth simulating."""
        return BUDGETS * self.inputs.cluster.max_gpus

    def _sized(self) -> list[tuple[Sized, tuple[int, int]]]:
        """Return layouts and limits with their sizes by forecast, cheapest first."""
        slow = [start.off_by(self.errors) for start in self.starts.split]
        slack = {start.layout: check.ratio for check, start in self.starts.alone}
        todo = sorted(
            (sized for start in slow for sized in limits(start, self.inputs)),
            key=lambda each: (
                each.bound / (NEARLY - slack[each.slow.layout]),
                each.slow.layout.order,
                -_limit(each.slow),
            ),
        )
        found: list[tuple[tuple[float, float, int], Sized, tuple[int, int]]] = []
        below = FREE
        most_gpus = MOST_BUDGETS * self.inputs.cluster.max_gpus
        for start in todo:
            if start.bound * CLOSE >= below or start.slow.sized(*start.lowest).gpus > most_gpus:
                continue
            sizes = fewest(start, self.inputs, below * CHEAPER / CLOSE)
            if sizes is None:
                continue
            chosen = start.slow.sized(*sizes)
            below = min(below, cost(self.inputs, chosen))
            found.append((self._rank(chosen), start, sizes))
        found.sort(key=lambda each: each[0])
        # Closed forms err in the queue for prefill: what stands behind the same pool they rank.
        firsts: dict[LayoutShape | None, tuple[Sized, tuple[int, int]]] = {}
        for _, start, sizes in found:
            firsts.setdefault(start.slow.layout.prefill, (start, sizes))
        return list(firsts.values())

    def _rank(self, chosen: Candidate) -> tuple[float, float, int]:
        """Cheapest first, then lower TTFT to the millisecond, then room in the decode batch."""
        predicted = forecast(chosen.tandem)
        share = self.inputs.scenario.slo.level
        ttft_s = FREE if predicted is None else round(predicted.ttft.quantile(share), 3)
        return cost(self.inputs, chosen), ttft_s, -_limit(chosen)

    def _by_forecast(self, sized: list[tuple[Sized, tuple[int, int]]]) -> Found | None:
        """Take what closed forms say: of measured machines, whose own load tests say more."""
        if not sized:
            return None
        start, sizes = sized[0]
        chosen = self._as_predicted(start.slow).sized(*sizes)
        return Found(candidate=chosen, forecast=forecast(chosen.tandem), errors=self.errors)

    def _as_predicted(self, slow: Candidate) -> Candidate:
        """Return the start with step times as predicted, and the limits of the slow one."""
        starts = (*self.starts.split, *self.starts.mixed)
        start = next(each for each in starts if each.layout == slow.layout)
        return start.limited(_limit(slow))

    def _confirmed(self, chosen: Candidate, below: float) -> Found | None:
        """Ask a fresh seed; grow the pool it blames until both agree."""
        proof = confirmed(self.inputs, self.trials, chosen, below)
        return None if proof is None else self._found(*proof)

    def _found(self, chosen: Candidate, verdicts: tuple[PlanVerdict, ...]) -> Found:
        """Return a configuration with its proof."""
        closed = chosen.layout.prefill is not None and not chosen.tandem.local_threshold_tokens
        return Found(
            candidate=chosen,
            forecast=forecast(chosen.tandem) if closed else None,
            errors=self.errors,
            verdicts=verdicts,
        )

    # --- pools that do both

    def _mixed(self, split: Found | None) -> Found | None:
        """
        Find the cheapest aggregated pool, if it is cheaper than twice the split ones.

        A look tells which layout; where it may be cheaper than the split pools it has to prove it.
        """
        below = FREE if split is None else 2 * cost(self.inputs, split.candidate)
        looks = Trials(self.inputs, self.errors, patient=False, work=self.work)
        seen = self._mixed_below(below, looks)
        if seen is None or 2 * cost(self.inputs, seen.candidate) * (1 - FINE) >= below:
            return seen
        return self._mixed_below(below, self.trials)

    def _mixed_below(self, below: float, trials: Trials) -> Found | None:
        """Settle every aggregated layout below a cost; patient *trials* also ask a fresh seed."""
        best: Found | None = None
        slow = [start.off_by(self.errors) for start in self.starts.mixed]
        lowest = {start.layout: mixed_lowest(self.inputs, start) for start in slow}
        wide = sorted(slow, key=lambda each: (-each.layout.decode.gpus, each.layout.order))
        for start in wide:  # wide replicas stop fewer answers for shorter
            if self._mixed_bound(start, lowest[start.layout]) >= below:
                continue
            one = PoolSizing(
                inputs=self.inputs,
                trials=trials,
                start=self._as_predicted(start),
                lowest=(0, lowest[start.layout]),
                below=below,
                most_gpus=self._most_gpus,
            )
            settled = settle_mixed(one)
            found = None if settled is None else self._found(settled, ())
            if found is not None and trials.patient:
                found = self._confirmed(found.candidate, below)
            if found is not None:
                best, below = found, cost(self.inputs, found.candidate)
        return best

    def _mixed_bound(self, start: Candidate, lowest: int) -> float:
        """Return what the fewest replicas cost."""
        return lowest * cost_of(self.inputs, start.layout.decode)

    def _comparison(self, best: Found, split: Found | None, mixed: Found | None) -> str:
        """Say what the other kind of pools would take."""
        if self.inputs.scenario.search.pools != "any" or not self.starts.mixed:
            return ""
        if best is mixed:
            if split is None:
                return "split pools do not hold the SLO"
            return f"split pools need {split.candidate.gpus} GPUs ({split.candidate})"
        if mixed is None:
            return "aggregated pools do not hold the SLO with twice as many GPUs"
        return f"aggregated pools need {mixed.candidate.gpus} GPUs ({mixed.candidate})"


def _limit(candidate: Candidate) -> int:
    """Return the decode batch limit."""
    return candidate.tandem.decode.max_batch_size
