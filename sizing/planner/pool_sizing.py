"""Pool sizes: from a first estimate to the cheapest that hold the SLO when they are simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import Inputs
from sizing.planner import bounds
from sizing.planner.candidates import (
    Candidate,
    cost,
    cost_of,
    fewest_by_utilisation,
    step_limit_s,
    unloaded_checks,
)
from sizing.planner.error_model import step_errors
from sizing.planner.simulated_check import MAX_REPLICAS, SloSimulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from sizing.planner.error_model import StepErrors
    from sizing.planner.result import Found
    from sizing.planner.simulated_check import Simulations

BATCH_DEVIATIONS = 2.0
"""Standard deviations of a Poisson number by which an estimated decode batch is below its limit."""

MAX_SWAPS = 4
"""Replicas of one pool that are tried in place of some of the other."""

QUICK_STEP = 0.03
"""Search step of quick mode, as a share of a pool and of a limit."""

PRECISE_STEP = 1 / 64
"""Search step of precise mode, as a share of a pool: chance moves large pools by more than one."""

ROLES = ("prefill", "decode")

Sizes = tuple[int, int]
"""Replicas of prefill and decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizing:
    """
    The sizing of one layout and batch limit.

    Attributes:
        simulator: judges sizes, with steps as slow as the confidence asks for.
        candidate: one replica per pool, with step times as predicted.
        lowest: fewest replicas of prefill and decode.
        below: cost that a configuration has to stay below.
    """

    inputs: Inputs
    simulator: SloSimulator
    candidate: Candidate
    lowest: Sizes
    below: float
    max_gpus: int

    def cost(self, sizes: Sizes) -> float:
        """Return the cost of a configuration."""
        return cost(self.inputs, self.candidate.sized(*sizes))

    def affordable(self, sizes: Sizes) -> bool:
        """Return whether a configuration is cheap enough to be simulated."""
        gpus = self.candidate.sized(*sizes).gpus
        return self.cost(sizes) < self.below and gpus <= self.max_gpus

    def step(self, count: int) -> int:
        """Return the search step in replicas: 1, or a share of a large pool."""
        return max(1, int(count * (PRECISE_STEP if self.simulator.precise else QUICK_STEP)))

    def tight(self, sizes: Sizes) -> bool:
        """Return whether quick mode is done: sizes 3 % smaller would not hold."""
        if self.simulator.precise or self.step(max(sizes)) == 1:
            return False
        check = self.simulator.verdict(self.candidate.sized(*sizes)).check
        return check is not None and 1 - QUICK_STEP < check.ratio <= 1

    def holds(self, sizes: Sizes) -> bool:
        """Return whether sizes are affordable and hold the SLO when simulated."""
        return self.affordable(sizes) and self.simulator.verdict(self.candidate.sized(*sizes)).holds


def size_split_pools(sizing: PoolSizing, guess: Sizes) -> Candidate | None:
    """
    Find the cheapest sizes near *guess*: each pool as small as it can be, then swaps.

    Pools grow one after the other, the one that the missed limit asks for, until the SLO holds.
    """
    grown = _grown(sizing, guess)
    if grown is None:
        return None
    (prefill_count, decode_count), floor = grown
    if sizing.tight((prefill_count, decode_count)):
        return sizing.candidate.sized(prefill_count, decode_count)
    prefill_count = _shrunk(
        sizing, lambda many: sizing.holds((many, decode_count)), (floor[0], prefill_count), at=0
    )
    decode_count = _shrunk(
        sizing, lambda many: sizing.holds((prefill_count, many)), (floor[1], decode_count), at=1
    )
    return sizing.candidate.sized(*_swapped(sizing, (prefill_count, decode_count)))


def _shrunk(
    sizing: PoolSizing, holds: Callable[[int], bool], span: tuple[int, int], *, at: int
) -> int:
    """
    Return the fewest replicas of one pool: fewer than the first are known to fail, the last hold.

    The search begins next to a size that was simulated and failed, else at the size that holds.
    """
    floor, count = span
    step = sizing.step(count)
    guess = floor - 1 + step if floor > sizing.lowest[at] else count
    return least_near(holds, guess, floor, count, step=step) or count


def _grown(sizing: PoolSizing, guess: Sizes) -> tuple[Sizes, Sizes] | None:
    """
    Grow the bottleneck pool until the SLO holds; `None` where that costs too much.

    Where the cost is limited, a pool grows at once to the largest that it allows: a single failure
    then ends the search.

    Returns:
        Sizes that hold, and per pool the fewest replicas that are not known to fail.
    """
    floor, step = list(sizing.lowest), [0, 0]
    sizes = [max(pair) for pair in zip(guess, sizing.lowest, strict=True)]
    while True:
        chosen = sizing.candidate.sized(*sizes)
        if not sizing.affordable(chosen.sizes):  # one pool gets all the money that is left
            for at in (0, 1):
                most = _most(sizing, chosen.sizes, at)
                found = _replaced(chosen.sizes, at, most)
                if sizing.lowest[at] <= most < sizes[at] and sizing.holds(found):
                    return found, sizing.lowest
            return None
        verdict = sizing.simulator.verdict(chosen)
        if verdict.holds:
            return chosen.sizes, (floor[0], floor[1])
        if verdict.exhausted or max(sizes) > MAX_REPLICAS:
            return None
        at = ROLES.index(verdict.bottleneck_role)
        floor[at] = sizes[at] + 1
        step[at] = max(sizing.step(sizes[at]), sizes[at] // 48, 2 * step[at])
        most = _most(sizing, chosen.sizes, at)
        limited = sizing.below < np.inf and most > sizes[at]
        sizes[at] = most if limited else sizes[at] + step[at]


def _most(sizing: PoolSizing, sizes: Sizes, at: int) -> int:
    """Return the most replicas of one pool that are affordable beside the other pool."""
    shapes = [sizing.candidate.layout.shapes[role] for role in ROLES]
    own, other, beside = shapes[at], shapes[1 - at], sizes[1 - at]
    most = (sizing.max_gpus - beside * other.gpus) // own.gpus
    rest = sizing.below - beside * cost_of(sizing.inputs, other)
    if rest < np.inf:
        most = min(most, int(np.ceil(rest / cost_of(sizing.inputs, own) - 1e-9)) - 1)
    return most


def _replaced(sizes: Sizes, at: int, count: int) -> Sizes:
    return (count, sizes[1]) if at == 0 else (sizes[0], count)


def _swapped(sizing: PoolSizing, sizes: Sizes) -> Sizes:
    """Try fewer replicas of one pool with a few more of the other, where that is cheaper."""
    best = sizes
    if sizing.step(max(sizes)) > 1:  # one replica of so many is less than the search resolves
        return best
    for more, fewer in ((0, 1), (1, 0)):
        for extra in range(1, MAX_SWAPS + 1):
            found = _replaced(_replaced(best, fewer, best[fewer] - 1), more, best[more] + extra)
            if found[fewer] < sizing.lowest[fewer] or sizing.cost(found) >= sizing.cost(best):
                break
            if sizing.holds(found):
                best = found
                break
    return best


def size_mixed_pool(sizing: PoolSizing) -> Candidate | None:
    """Find the fewest replicas of an aggregated pool, starting at the fluid estimate."""
    candidate = sizing.candidate
    most = int(
        min(MAX_REPLICAS, sizing.below / cost_of(sizing.inputs, candidate.layout.decode) + 1)
    )
    most = min(most, sizing.max_gpus // candidate.layout.decode.gpus)
    while most >= 1 and not sizing.affordable((0, most)):
        most -= 1
    floor = sizing.lowest[1]
    if most < floor:
        return None
    guess = min(most, fluid_replicas(sizing.inputs, candidate, floor))
    if sizing.below < np.inf and not sizing.holds((0, most)):
        return None  # a single failure ends the search
    if sizing.holds((0, guess)) and sizing.tight((0, guess)):
        return candidate.sized(0, guess)
    found = least_near(
        lambda many: sizing.holds((0, many)), guess, floor, most, step=sizing.step(guess)
    )
    return None if found is None else candidate.sized(0, found)


def estimated_sizes(
    candidate: Candidate, inputs: Inputs, errors: StepErrors, lowest: Sizes
) -> Sizes:
    """
    Estimate the replicas of split pools that hold the SLO: where the simulations start.

        decode: the least D with b + 2 sqrt(b) <= B_max, b = lambda E[o] t(b) / D
        prefill: the least P with C(P, rho) exp(-slack / tau) <= 1 - level,
        tau = E[S^2] / (2 E[S] P (1 - rho))      (docs/model.md, eq. L2)
        and, in G groups that step together, C(G, P rho) (1 - slack / E[S]) <= 1 - level:
        without an idle group a prompt waits for the rest of a step

    Args:
        candidate: one replica per pool, with step times as predicted.
        errors: factors on step times and latencies that the confidence asks for.
        lowest: replicas below which no size holds.

    Source:
        Erlang's C; a busy pool empties its queue like one server P times as fast (Lee and Longton).

    Ignores:
        Policies that leave one replica idle while another has a queue, interference, and that
        prefill spaces the prompts for decode: a simulation decides.
    """
    slow, slos = candidate.with_errors(errors), inputs.scenario.promises
    tandem = slow.tandem
    limit = tandem.decode.max_batch_size
    batch = max(1.0, (np.sqrt(BATCH_DEVIATIONS**2 / 4 + limit) - BATCH_DEVIATIONS / 2) ** 2)
    step_s = bounds.decode_step_s(tandem, batch)
    tokens_per_s = tandem.workload.requests_per_s * float(tandem.output_tokens.mean())
    pace_s = bounds.pace_s(tandem, batch)
    decode = int(np.ceil(tokens_per_s * pace_s / batch / slow.layout.decode.lanes - 1e-9))
    unloaded = [each for each in unloaded_checks(candidate, slos, errors) if each.metric == "ttft"]
    left_s = min(each.limit_s - each.seconds for each in unloaded)
    slack_s = max(0.0, left_s - step_s) / errors.ttft
    level = max(slo.level for slo in slos.values())
    load, service_s = bounds.prefill_load(tandem), bounds.prefill_s(tandem)
    variation = float(np.mean(service_s**2)) / float(service_s.mean()) ** 2
    jobs = slack_s / (load / tandem.prefill_requests_per_s)
    shape = slow.layout.shapes["prefill"]

    def late(replicas: int) -> float:
        servers = replicas * shape.lanes
        spare = max(1e-9, servers - load)
        queued = float(_erlang_c(servers, load) * np.exp(-jobs * 2 * spare / variation))
        in_step = (
            0.0
            if shape.slicing.dp == 1
            else _erlang_c(replicas * shape.slicing.pp, load) * max(0.0, 1 - jobs)
        )
        return max(queued, in_step)

    count = lowest[0]
    while count < MAX_REPLICAS and late(count) > 1 - level:
        count += max(1, count // 32)
    return count, max(lowest[1], decode)


def _erlang_c(servers: int, load: float) -> float:
    """Return the chance to wait in M/M/c at a load of so many busy servers."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def fluid_replicas(inputs: Inputs, slow: Candidate, lowest: int) -> int:
    """
    Estimate the aggregated replicas that hold TPOT, where each prompt delays all other tokens.

        (docs/model.md, eq. T6)
    """
    limit_s = step_limit_s(slow.tandem, inputs.scenario.promises) / slow.tandem.tokens_per_step
    count = lowest
    while count < MAX_REPLICAS:
        pace_s, batch = bounds.steady_decode(slow.sized(0, count).tandem, split=False)
        if pace_s <= limit_s and batch < np.inf:
            break
        count = max(count + 1, int(count * 1.05))
    return count


def between(holds: Callable[[int], bool], low: int, high: int, *, step: int) -> int:
    """Bisect between *low*, which fails, and *high*, which holds, down to *step*; return *high*."""
    while high - low > step:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def least_near(
    holds: Callable[[int], bool], guess: int, floor: int, ceiling: int, *, step: int
) -> int | None:
    """
    Return the smallest count from *floor* to *ceiling* that *holds*, searched from *guess* on.

    A larger count never fails where a smaller one holds. Strides double away from the guess, then
    the last one is halved down to *step*.
    """
    guess, stride = min(max(guess, floor), ceiling), step
    if holds(guess):
        high, low = guess, guess - stride
        while low >= floor and holds(low):
            high, stride = low, 2 * stride
            low = high - stride
        low = max(low, floor - 1)
    else:
        low, high = guess, min(guess + stride, ceiling)
        while not holds(high):
            if high >= ceiling:
                return None
            stride *= 2
            low, high = high, min(high + stride, ceiling)
    return between(holds, low, high, step=step)


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
