"""From a first guess to the cheapest sizes that hold when they are simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import Inputs
from sizing.planner.candidate import Candidate
from sizing.planner.closed_form import MOST_REPLICAS, between, least_near
from sizing.planner.objective import cost, cost_of
from sizing.planner.trial import Trials
from sizing.queueing import decode, prefill

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SWAPS = 4
"""Replicas of one pool tried in place of some of the other."""

FINE = 0.03
"""Share of a pool that a look does not tell apart, nor of a limit."""

FAR = 1.5
"""Times the guess: up to there the most that is worth it is asked first, to be done at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizing:
    """
    A layout and batch limit, with step times as predicted; *trials* make them slower.

    Attributes:
        start: one replica a pool.
        lowest: fewest replicas of prefill and decode.
        below: cost that a configuration has to stay below to matter.
        most_gpus: that it may take to matter.
    """

    inputs: Inputs
    trials: Trials
    start: Candidate
    lowest: tuple[int, int]
    below: float
    most_gpus: int

    def matters(self, sizes: tuple[int, int]) -> bool:
        """Say whether a configuration is worth a simulation."""
        chosen = self.start.sized(*sizes)
        return cost(self.inputs, chosen) < self.below and chosen.gpus <= self.most_gpus

    def grain(self, count: int) -> int:
        """Return how fine sizes are told apart: every replica, or 3 % where a look is enough."""
        return 1 if self.trials.patient else max(1, int(count * FINE))

    def tight(self, sizes: tuple[int, int]) -> bool:
        """Say whether a look needs no second one: nothing 3 % smaller would hold."""
        if self.grain(max(sizes)) == 1:
            return False
        check = self.trials.verdict(self.start.sized(*sizes)).check
        return check is not None and 1 - FINE < check.ratio <= 1

    def holds(self, sizes: tuple[int, int]) -> bool:
        """Say whether it is cheap enough and holds when simulated."""
        return self.matters(sizes) and self.trials.verdict(self.start.sized(*sizes)).holds


def settle_split(one: PoolSizing, guess: tuple[int, int]) -> Candidate | None:
    """
    Find the cheapest sizes near *guess*: each pool as small as it can be, then swaps.

    Pools grow one after the other, the one that the missed limit asks for, until the SLO holds.
    """
    grown = _grown(one, guess)
    if grown is None:
        return None
    (prefill_count, decode_count), floor = grown
    if one.tight((prefill_count, decode_count)):
        return one.start.sized(prefill_count, decode_count)
    prefill_count = _shrunk(
        lambda many: one.holds((many, decode_count)), floor[0], prefill_count, one, 0
    )
    decode_count = _shrunk(
        lambda many: one.holds((prefill_count, many)), floor[1], decode_count, one, 1
    )
    return one.start.sized(*_swapped(one, (prefill_count, decode_count)))


def _shrunk(
    holds: Callable[[int], bool], floor: int, count: int, one: PoolSizing, which: int
) -> int:
    """Return the fewest replicas of one pool; below *floor* they were seen to fail, or bound to."""
    grain = one.grain(count)
    if floor > one.lowest[which]:
        return between(holds, floor - 1, count, grain=grain)
    return least_near(holds, count, floor, count, grain=grain) or count


Sizes = tuple[int, int]
"""Replicas of prefill and decode."""


def _grown(one: PoolSizing, guess: Sizes) -> tuple[Sizes, Sizes] | None:
    """
    Grow the pool to blame until the SLO holds; `None` where that costs too much.

    Returns:
        Sizes that hold, and the fewest of each pool that were not seen to fail.
    """
    roles = ("prefill", "decode")
    floor = dict(zip(roles, one.lowest, strict=True))
    sizes = {role: max(count, floor[role]) for role, count in zip(roles, guess, strict=True)}
    step = dict.fromkeys(roles, 0)
    while True:
        chosen = one.start.sized(sizes["prefill"], sizes["decode"])
        if not one.matters(chosen.sizes):
            fitted = _fitted_below(one, sizes)
            return None if fitted is None else (fitted, one.lowest)
        verdict = one.trials.verdict(chosen)
        if verdict.holds:
            return (sizes["prefill"], sizes["decode"]), (floor["prefill"], floor["decode"])
        if verdict.exhausted or max(sizes.values()) > MOST_REPLICAS:
            return None
        role = verdict.blame
        floor[role] = sizes[role] + 1
        step[role] = max(1, sizes[role] // 48, 2 * step[role])
        sizes[role] += step[role]


def _fitted_below(one: PoolSizing, sizes: dict[str, int]) -> tuple[int, int] | None:
    """Give what money is left to one pool, in case that holds."""
    shapes = one.start.layout.shapes
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        lowest = dict(zip(("prefill", "decode"), one.lowest, strict=True))
        kept = sizes[other]
        most = (one.most_gpus - kept * shapes[other].gpus) // shapes[role].gpus
        rest = one.below - kept * cost_of(one.inputs, shapes[other])
        if rest < np.inf:
            most = min(most, int(np.ceil(rest / cost_of(one.inputs, shapes[role]) - 1e-9)) - 1)
        if lowest[role] <= most < sizes[role]:
            tried = {role: most, other: kept}
            found = (tried["prefill"], tried["decode"])
            if one.holds(found):
                return found
    return None


def _swapped(one: PoolSizing, sizes: tuple[int, int]) -> tuple[int, int]:
    """Try fewer replicas of one pool with a few more of the other, where that is cheaper."""
    best = sizes
    if one.grain(max(sizes)) > 1:
        return best
    for more, fewer in ((0, 1), (1, 0)):
        for extra in range(1, MOST_SWAPS + 1):
            tried = list(best)
            tried[more] += extra
            tried[fewer] -= 1
            found = (tried[0], tried[1])
            if tried[fewer] < one.lowest[fewer] or not _cheaper(one, found, best):
                break
            if one.holds(found):
                best = found
                break
    return best


def _cheaper(one: PoolSizing, found: tuple[int, int], best: tuple[int, int]) -> bool:
    """Compare costs."""
    costs = [cost(one.inputs, one.start.sized(*sizes)) for sizes in (found, best)]
    return costs[0] < costs[1]


def settle_mixed(one: PoolSizing) -> Candidate | None:
    """Find the fewest replicas of a pool that does both, from the fluid estimate on."""
    slow = one.start
    most = int(min(MOST_REPLICAS, one.below / cost_of(one.inputs, slow.layout.decode) + 1))
    most = min(most, one.most_gpus // slow.layout.decode.gpus)
    while most >= 1 and not one.matters((0, most)):
        most -= 1
    floor = one.lowest[1]
    if most < floor:
        return None
    guess = min(most, fluid_replicas(one.inputs, slow, floor))
    if most < FAR * guess and not one.holds((0, most)):
        return None
    if one.holds((0, guess)) and one.tight((0, guess)):
        return slow.sized(0, guess)
    found = least_near(
        lambda many: one.holds((0, many)), guess, floor, most, grain=one.grain(guess)
    )
    return None if found is None else slow.sized(0, found)


def mixed_lowest(inputs: Inputs, slow: Candidate) -> int:
    """Fewest mixed replicas at the allowed utilisation."""
    ceiling = inputs.scenario.search.max_utilisation_fraction
    return max(1, int(np.ceil(mixed_load(slow) / ceiling - 1e-9)))


def mixed_load(slow: Candidate) -> float:
    """
    Mixed replicas that are busy all the time: prompts and tokens each take a share of full steps.

        D >= lambda (S_p + E[o] t_d(B)/B), S_p: compute and attention of a prompt alone
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
    Guess how many mixed replicas hold TPOT: prompts stop the tokens of all others.

        t_d(B) / (1 - rho_p) <= TPOT, B = (lambda / D) E[o] t_d(B) / (1 - rho_p)
        (docs/model.md, eq. L6)
    """
    limit_s = inputs.scenario.slo.per_token_s or np.inf
    count = lowest
    while count < MOST_REPLICAS:
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
