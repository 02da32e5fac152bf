"""GPUs that a plan's layout needs at other confidences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.planner.closed_form import Sized, fewest, fewest_by_utilisation
from sizing.planner.evidence import step_errors
from sizing.planner.settle import PoolSizing, mixed_lowest, settle_mixed, settle_split
from sizing.planner.trial import Trials

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.answer import Found
    from sizing.planner.candidate import Candidate
    from sizing.planner.evidence import StepErrors
    from sizing.planner.trial import SimulationBudget

LEVELS = (0.5, 0.8, 0.95)
"""Confidences whose GPUs stand beside the plan's."""

BUDGETS = 4
"""Times `cluster.max_gpus` up to which a level is looked for; beyond, it takes at least that."""

SMALL_POOL = 32
"""Replicas up to which a guess in proportion is off by one or two."""

GROWTH = 1.5
"""Power of the step times with which a pool grows: it serves less, and may queue for less."""


def gpus_at(inputs: Inputs, best: Found, work: SimulationBudget) -> dict[float, int]:
    """
    Return the GPUs that the plan's layout needs by confidence, one short run a size.

    Empty of a measured machine, where nothing is simulated; without those that the search has no
    work left for.
    """
    if not best.verdicts:
        return {}
    asked, gpus = inputs.scenario.search.confidence_fraction, best.candidate.gpus
    found = {asked: gpus}
    before: Candidate | None = None
    for share in LEVELS:
        if share not in found:
            if share > asked and max(found) == asked:
                before = best.candidate
            trials = Trials(inputs, step_errors(inputs, share), patient=False, work=work)
            settled = _at(inputs, best, trials, before)
            if trials.exhausted:
                break
            before = settled
            # What chance did in a short run must not turn the order around.
            found[share] = (min if share < asked else max)(before.gpus, gpus)
    return dict(sorted(found.items()))


def _at(inputs: Inputs, best: Found, trials: Trials, floor: Candidate | None) -> Candidate:
    """Settle the plan's layout again with other step times, from the sizes of *floor* on."""
    chosen, errors = best.candidate, trials.errors
    split = chosen.layout.prefill is not None
    start = chosen.sized(1 if split else 0, 1)
    slow = start.off_by(errors)
    lowest = fewest_by_utilisation(slow, inputs) if split else (0, mixed_lowest(inputs, slow))
    if floor is not None:
        lowest = (max(lowest[0], floor.sizes[0]), max(lowest[1], floor.sizes[1]))
    one = PoolSizing(
        inputs=inputs,
        trials=trials,
        start=start,
        lowest=lowest,
        below=float("inf"),
        most_gpus=BUDGETS * max(chosen.gpus, inputs.cluster.max_gpus),
    )
    if not split:
        settled = settle_mixed(one)
    else:
        sized = Sized(slow=slow, lowest=one.lowest, bound=0.0)
        settled = settle_split(one, _guess(inputs, best, errors, sized))
    return chosen if settled is None else settled


def _guess(inputs: Inputs, best: Found, errors: StepErrors, start: Sized) -> tuple[int, int]:
    """Guess sizes with other step times: small pools in proportion, large ones by forecast."""
    sizes = best.candidate.sizes
    if max(sizes) > SMALL_POOL:
        return fewest(start, inputs, float("inf")) or start.lowest
    slower = errors.prefill / best.errors.prefill, errors.decode / best.errors.decode
    return (
        max(1, round(sizes[0] * slower[0] ** GROWTH)),
        max(1, round(sizes[1] * slower[1] ** GROWTH)),
    )
