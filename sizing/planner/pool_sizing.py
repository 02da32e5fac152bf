"""Pool sizes: from a first guess to the cheapest that hold the SLO when they are simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import Inputs
from sizing.planner.candidates import Candidate
from sizing.planner.closed_form import MAX_REPLICAS, between, least_near
from sizing.planner.objective import cost, cost_of
from sizing.planner.simulated_check import SloSimulator
from sizing.queueing import decode, prefill

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SWAPS = 4
"""Replicas of one pool that are tried in place of some of the other."""

QUICK_STEP = 0.03
"""Search step of quick mode, as a share of a pool and of a limit."""

TEST_MAXIMUM_BELOW = 1.5
"""Multiple of the guess below which the affordable maximum is tested first: one failure ends it."""

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
        max_gpus: GPUs that a configuration may have.
    """

    inputs: Inputs
    simulator: SloSimulator
    candidate: Candidate
    lowest: Sizes
    below: float
    max_gpus: int

    def affordable(self, sizes: Sizes) -> bool:
        """Return whether a configuration is cheap enough to be simulated."""
        chosen = self.candidate.sized(*sizes)
        return cost(self.inputs, chosen) < self.below and chosen.gpus <= self.max_gpus

    def step(self, count: int) -> int:
        """Return the search step in replicas: 1, or 3 % of the pool in quick mode."""
        return 1 if self.simulator.precise else max(1, int(count * QUICK_STEP))

    def tight(self, sizes: Sizes) -> bool:
        """Return whether quick mode is done: sizes 3 % smaller would not hold."""
        if self.step(max(sizes)) == 1:
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
        lambda many: sizing.holds((many, decode_count)), floor[0], prefill_count, sizing, 0
    )
    decode_count = _shrunk(
        lambda many: sizing.holds((prefill_count, many)), floor[1], decode_count, sizing, 1
    )
    return sizing.candidate.sized(*_swapped(sizing, (prefill_count, decode_count)))


def _shrunk(
    holds: Callable[[int], bool], floor: int, count: int, sizing: PoolSizing, which: int
) -> int:
    """Return the fewest replicas of one pool; fewer than *floor* are known to fail."""
    step = sizing.step(count)
    if floor > sizing.lowest[which]:
        return between(holds, floor - 1, count, step=step)
    return least_near(holds, count, floor, count, step=step) or count


def _grown(sizing: PoolSizing, guess: Sizes) -> tuple[Sizes, Sizes] | None:
    """
    Grow the bottleneck pool until the SLO holds; `None` where that costs too much.

    Returns:
        Sizes that hold, and per pool the fewest replicas that are not known to fail.
    """
    roles = ("prefill", "decode")
    floor = dict(zip(roles, sizing.lowest, strict=True))
    sizes = {role: max(count, floor[role]) for role, count in zip(roles, guess, strict=True)}
    step = dict.fromkeys(roles, 0)
    while True:
        chosen = sizing.candidate.sized(sizes["prefill"], sizes["decode"])
        if not sizing.affordable(chosen.sizes):
            found = _largest_affordable(sizing, sizes)
            return None if found is None else (found, sizing.lowest)
        verdict = sizing.simulator.verdict(chosen)
        if verdict.holds:
            return (sizes["prefill"], sizes["decode"]), (floor["prefill"], floor["decode"])
        if verdict.exhausted or max(sizes.values()) > MAX_REPLICAS:
            return None
        role = verdict.bottleneck_role
        floor[role] = sizes[role] + 1
        step[role] = max(1, sizes[role] // 48, 2 * step[role])
        sizes[role] += step[role]


def _largest_affordable(sizing: PoolSizing, sizes: dict[str, int]) -> Sizes | None:
    """Return sizes that give one pool all the money that is left, if they hold."""
    shapes = sizing.candidate.layout.shapes
    lowest = dict(zip(("prefill", "decode"), sizing.lowest, strict=True))
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        kept = sizes[other]
        most = (sizing.max_gpus - kept * shapes[other].gpus) // shapes[role].gpus
        rest = sizing.below - kept * cost_of(sizing.inputs, shapes[other])
        if rest < np.inf:
            most = min(most, int(np.ceil(rest / cost_of(sizing.inputs, shapes[role]) - 1e-9)) - 1)
        if lowest[role] <= most < sizes[role]:
            counts = {role: most, other: kept}
            found = (counts["prefill"], counts["decode"])
            if sizing.holds(found):
                return found
    return None


def _swapped(sizing: PoolSizing, sizes: Sizes) -> Sizes:
    """Try fewer replicas of one pool with a few more of the other, where that is cheaper."""
    best = sizes
    if sizing.step(max(sizes)) > 1:
        return best
    for more, fewer in ((0, 1), (1, 0)):
        for extra in range(1, MAX_SWAPS + 1):
            counts = list(best)
            counts[more] += extra
            counts[fewer] -= 1
            found = (counts[0], counts[1])
            if counts[fewer] < sizing.lowest[fewer] or not _cheaper(sizing, found, best):
                break
            if sizing.holds(found):
                best = found
                break
    return best


def _cheaper(sizing: PoolSizing, found: Sizes, best: Sizes) -> bool:
    costs = [cost(sizing.inputs, sizing.candidate.sized(*sizes)) for sizes in (found, best)]
    return costs[0] < costs[1]


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
    if most < TEST_MAXIMUM_BELOW * guess and not sizing.holds((0, most)):
        return None
    if sizing.holds((0, guess)) and sizing.tight((0, guess)):
        return candidate.sized(0, guess)
    found = least_near(
        lambda many: sizing.holds((0, many)), guess, floor, most, step=sizing.step(guess)
    )
    return None if found is None else candidate.sized(0, found)


def mixed_lowest(inputs: Inputs, slow: Candidate) -> int:
    """Return the fewest aggregated replicas at the allowed utilisation."""
    ceiling = inputs.scenario.search.max_utilisation_fraction
    return max(1, int(np.ceil(mixed_load(slow) / ceiling - 1e-9)))


def mixed_load(slow: Candidate) -> float:
    """
    Return the aggregated replicas that are busy all the time: prompts and tokens share steps.

        D >= lambda (S_p + E[o] t_d(B)/B), S_p: compute and attention of one prompt
        (docs/model.md, eq. L6)
    """
    tandem = slow.sized(0, 1).tandem
    step = tandem.step_model.decode
    n = tandem.computed_tokens
    pairs = n * (tandem.workload.prefix_tokens + (n + 1) / 2)
    prompt_s = float((step.per_prefill_token_s * n + step.per_pair_s * pairs).mean())
    token_s = step.per_sequence_s + step.per_context_token_s * tandem.context[0]
    answer_s = float(tandem.output_tokens.mean()) * token_s
    busy = tandem.workload.requests_per_s * (prompt_s + answer_s) / slow.layout.decode.lanes
    return max(busy, decode.utilisation(tandem))


def fluid_replicas(inputs: Inputs, slow: Candidate, lowest: int) -> int:
    """
    Estimate the aggregated replicas that hold TPOT, where each prompt delays all other tokens.

        t_d(B) / (1 - rho_p) <= TPOT, B = (lambda / D) E[o] t_d(B) / (1 - rho_p)
        (docs/model.md, eq. L6)
    """
    limit_s = inputs.scenario.slo.per_token_s or np.inf
    count = lowest
    while count < MAX_REPLICAS:
        tandem = slow.sized(0, count).tandem
        per_lane = tandem.workload.requests_per_s / tandem.decode.replicas
        left = 1 - per_lane * float(prefill.service_s(tandem).mean())
        pace, batch = 0.0, 1.0
        if left > 0:
            for _ in range(50):
                pace = float(decode.step_s(tandem, max(1.0, batch))) / left
                batch = per_lane * float(tandem.output_tokens.mean()) * pace
                if batch > tandem.decode.max_batch_size:
                    break
            if pace <= limit_s and batch <= tandem.decode.max_batch_size:
                return count
        count = max(count + 1, int(count * 1.05))
    return count
