"""GPUs that a plan's layout needs at other confidences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.planner.candidates import fewest_by_utilisation, unloaded_checks
from sizing.planner.error_model import step_errors
from sizing.planner.objective import cost
from sizing.planner.pool_sizing import (
    PoolSizing,
    estimated_sizes,
    size_mixed_pool,
    size_split_pools,
)
from sizing.planner.simulated_check import SloSimulator

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.candidates import Candidate
    from sizing.planner.error_model import StepErrors
    from sizing.planner.result import Found
    from sizing.planner.simulated_check import Simulations

CONFIDENCES = (0.5, 0.8, 0.95)
"""Confidences whose GPUs are printed beside the plan's."""

MAX_PLANS = 2
"""Multiple of the plan's GPUs up to which other sizes are searched."""


def gpus_by_confidence(simulations: Simulations, best: Found) -> dict[float, int]:
    """
    Return the GPUs that the plan's layout needs by confidence, with one quick run per size.

    Empty on a calibrated machine, of whose errors nothing is known; without the confidences that
    take more than `MAX_PLANS` times the plan's GPUs, or more simulation than the search has left.
    """
    inputs = simulations.inputs
    if inputs.calibration is not None:
        return {}
    planned, gpus = inputs.scenario.search.confidence_fraction, best.candidate.gpus
    found = {planned: gpus}
    before: Candidate | None = None
    for confidence in CONFIDENCES:
        if confidence not in found:
            if confidence > planned and max(found) == planned:
                before = best.candidate
            errors = step_errors(inputs, confidence)
            simulator = SloSimulator(simulations, errors, precise=False)
            before = sized_again(inputs, best, simulator, before)
            if before is None or simulator.exhausted:
                break
            # Chance in a quick run must not make a lower confidence need more GPUs.
            found[confidence] = (min if confidence < planned else max)(before.gpus, gpus)
    return dict(sorted(found.items()))


def sized_again(
    inputs: Inputs, best: Found, simulator: SloSimulator, floor: Candidate | None = None
) -> Candidate | None:
    """Size a plan's layout with the simulator's step times, from the sizes of *floor* on."""
    chosen = best.candidate
    split, errors = chosen.layout.prefill is not None, simulator.errors
    smallest = chosen.sized(1 if split else 0, 1)
    if any(each.ratio > 1 for each in unloaded_checks(smallest, inputs.scenario.promises, errors)):
        return None  # no number of replicas makes a single request quicker
    slow = smallest.with_errors(errors)
    lowest = fewest_by_utilisation(slow, inputs)
    if floor is not None:
        lowest = (max(lowest[0], floor.sizes[0]), max(lowest[1], floor.sizes[1]))
    sizing = PoolSizing(
        inputs=inputs,
        simulator=simulator,
        candidate=smallest,
        lowest=lowest,
        below=2 * MAX_PLANS * cost(inputs, chosen),
        max_gpus=MAX_PLANS * chosen.gpus,
    )
    if split:
        return size_split_pools(sizing, _guess(inputs, best, errors, lowest))
    return size_mixed_pool(sizing)


def _guess(
    inputs: Inputs, best: Found, errors: StepErrors, lowest: tuple[int, int]
) -> tuple[int, int]:
    """Guess sizes with other step times: the plan's, as much larger as their estimate is."""
    one = best.candidate.sized(1, 1)
    before, after = (
        estimated_sizes(one, inputs, each, fewest_by_utilisation(one.with_errors(each), inputs))
        for each in (best.errors, errors)
    )
    guess = [
        max(floor, round(size * new / old))
        for size, new, old, floor in zip(best.candidate.sizes, after, before, lowest, strict=True)
    ]
    return guess[0], guess[1]
