"""Pool sizes: from a first estimate to the cheapest that hold the SLO when they are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner import bounds
from sizing.planner.candidates import (
    fewest_by_utilisation,
    one_replica_each,
    step_limit_s,
    unloaded_checks,
)
from sizing.planner.configuration import Configuration, cost, cost_of
from sizing.planner.edge import RESOLUTION, least
from sizing.planner.error_model import AS_PREDICTED, StepErrors
from sizing.planner.simulated_check import (
    MAX_REPLICAS,
    VERIFY_REQUESTS,
    VERIFY_SEED,
    Simulations,
    under_seeds,
    verified,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sizing.planner.simulated_check import Found, PlanVerdict
    from sizing.planner.step_models import StepModels


BATCH_DEVIATIONS = 2.0
"""Standard deviations of a Poisson number by which an estimated decode batch is below its limit."""

MAX_SWAPS = 4
"""Replicas of one pool that are tried in place of some of the other."""

PRECISE_STEP = 1 / 64
"""Search step of precise mode, as a share of a pool: chance moves large pools by more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizing:
    """
    The sizing of one layout and batch limit.

    Attributes:
        errors: factors under which sizes must hold.
        quick: whether one short run decides; see `Simulations.holds`.
        lowest: the configuration with the fewest replicas that may hold.
        below: cost that a configuration has to stay below.
    """

    simulations: Simulations
    errors: StepErrors
    quick: bool
    lowest: Configuration
    below: float
    max_gpus: int

    def cost(self, chosen: Configuration) -> float:
        """Return the cost of a configuration."""
        return cost(self.simulations.inputs, chosen)

    def affordable(self, chosen: Configuration) -> bool:
        """Return whether a configuration is cheap enough to be simulated."""
        return self.cost(chosen) < self.below and chosen.gpus <= self.max_gpus

    def step(self, count: int) -> int:
        """Return the search step in replicas: 1, or a share of a large pool."""
        return max(1, int(count * (RESOLUTION if self.quick else PRECISE_STEP)))

    def tight(self, chosen: Configuration) -> bool:
        """Return whether quick mode is done: sizes 3 % smaller would not hold."""
        if not self.quick or self.step(max(chosen.replicas.values())) == 1:
            return False
        check = self.verdict(chosen).check
        return check is not None and 1 - RESOLUTION < check.ratio <= 1

    def verdict(self, chosen: Configuration) -> PlanVerdict:
        """Simulate a configuration."""
        return self.simulations.holds(chosen, self.errors, quick=self.quick)

    def holds(self, chosen: Configuration) -> bool:
        """Return whether a configuration is affordable and holds the SLO when simulated."""
        return self.affordable(chosen) and self.verdict(chosen).holds

    def least(
        self, chosen: Configuration, role: str, *, guess: int, floor: int, ceiling: int
    ) -> Configuration | None:
        """Return the same with the fewest replicas of a pool that hold; `None`: none do."""
        count = least(
            lambda many: self.holds(chosen.sized({role: many})),
            guess,
            floor,
            ceiling,
            step=self.step(guess),
        )
        return None if count is None else chosen.sized({role: count})


def size_split_pools(sizing: PoolSizing, guess: Configuration) -> Configuration | None:
    """
    Find the cheapest sizes near *guess*: each pool as small as it can be, then swaps.

    Pools grow one after the other, the one that the missed limit asks for, until the SLO holds.
    """
    grown = _grown(sizing, guess)
    if grown is None:
        return None
    chosen, floors = grown
    if sizing.tight(chosen):
        return chosen
    for role, floor in floors.items():
        count, lowest = chosen.replicas[role], sizing.lowest.replicas[role]
        # From next to a size that was simulated and failed, else from the one that holds.
        near = floor - 1 + sizing.step(count) if floor > lowest else count
        chosen = sizing.least(chosen, role, guess=near, floor=floor, ceiling=count) or chosen
    return _swapped(sizing, chosen)


def _grown(
    sizing: PoolSizing, guess: Configuration
) -> tuple[Configuration, Mapping[str, int]] | None:
    """
    Grow the bottleneck pool until the SLO holds; `None` where that costs too much.

    Where the cost is limited, a pool grows at once to the largest that it allows: a single failure
    then ends the search.

    Returns:
        Sizes that hold, and per pool the fewest replicas that are not known to fail.
    """
    lowest = sizing.lowest.replicas
    floor, step = dict(lowest), dict.fromkeys(lowest, 0)
    chosen = guess.sized({role: max(guess.replicas[role], lowest[role]) for role in lowest})
    while True:
        if not sizing.affordable(chosen):  # one pool gets all the money that is left
            for role, count in chosen.replicas.items():
                most = _most(sizing, chosen, role)
                if lowest[role] <= most < count and sizing.holds(chosen.sized({role: most})):
                    return chosen.sized({role: most}), lowest
            return None
        verdict = sizing.verdict(chosen)
        if verdict.holds:
            return chosen, floor
        if verdict.exhausted or max(chosen.replicas.values()) > MAX_REPLICAS:
            return None
        role = verdict.bottleneck_role
        count = chosen.replicas[role]
        floor[role] = count + 1
        step[role] = max(sizing.step(count), count // 48, 2 * step[role])
        most = _most(sizing, chosen, role)
        limited = sizing.below < np.inf and most > count
        chosen = chosen.sized({role: most if limited else count + step[role]})


def _most(sizing: PoolSizing, chosen: Configuration, role: str) -> int:
    """Return the most replicas of one pool that are affordable beside the other pool."""
    inputs, own = sizing.simulations.inputs, chosen.layout.shapes[role]
    without = chosen.sized({role: 0})
    most = (sizing.max_gpus - without.gpus) // own.gpus
    rest = sizing.below - cost(inputs, without)
    if rest < np.inf:
        most = min(most, int(np.ceil(rest / cost_of(inputs, own) - 1e-9)) - 1)
    return most


def _swapped(sizing: PoolSizing, chosen: Configuration) -> Configuration:
    """Try fewer replicas of one pool with a few more of the other, where that is cheaper."""
    best = chosen
    if sizing.step(max(chosen.replicas.values())) > 1:
        return best  # one replica of so many is less than the search resolves
    for more, fewer in permutations(chosen.replicas):
        for extra in range(1, MAX_SWAPS + 1):
            count, added = best.replicas[fewer] - 1, best.replicas[more] + extra
            swapped = best.sized({fewer: count, more: added})
            if count < sizing.lowest.replicas[fewer] or sizing.cost(swapped) >= sizing.cost(best):
                break
            if sizing.holds(swapped):
                best = swapped
                break
    return best


def size_mixed_pool(sizing: PoolSizing) -> Configuration | None:
    """Find the fewest replicas of an aggregated pool, starting at the fluid estimate."""
    lowest, simulations = sizing.lowest, sizing.simulations
    floor = lowest.replicas["mixed"]
    most = min(MAX_REPLICAS, _most(sizing, lowest, "mixed"))
    if most < floor:
        return None
    guess = fluid_replicas(simulations.models, lowest, AS_PREDICTED)
    if guess.replicas["mixed"] > most:
        guess = lowest.sized({"mixed": most})
    if sizing.below < np.inf and not sizing.holds(lowest.sized({"mixed": most})):
        return None  # a single failure ends the search
    if sizing.holds(guess) and sizing.tight(guess):
        return guess
    near = guess.replicas["mixed"]
    return sizing.least(lowest, "mixed", guess=near, floor=floor, ceiling=most)


def estimated_sizes(models: StepModels, lowest: Configuration, errors: StepErrors) -> Configuration:
    """
    Estimate the replicas of split pools that hold the SLO: where the simulations start.

        decode: the least D with b + 2 sqrt(b) <= B_max, b = lambda E[o] t(b) / D
        prefill: the least P with C(P, rho) exp(-slack / tau) <= 1 - level,
        tau = E[S^2] / (2 E[S] P (1 - rho))      (docs/model.md, eq. L2)
        and, in G groups that step together, C(G, P rho) (1 - slack / E[S]) <= 1 - level:
        without an idle group a prompt waits for the rest of a step

    Args:
        lowest: replicas below which no size holds.
        errors: factors on step times and latencies that the confidence asks for.

    Source:
        Erlang's C; a busy pool empties its queue like one server P times as fast (Lee and Longton).

    Ignores:
        Policies that leave one replica idle while another has a queue, interference, and that
        prefill spaces the prompts for decode: a simulation decides.
    """
    load, slos = models.load(lowest, errors), models.inputs.scenario.promises
    limit = lowest.batch_limit
    batch = max(1.0, (np.sqrt(BATCH_DEVIATIONS**2 / 4 + limit) - BATCH_DEVIATIONS / 2) ** 2)
    step_s = bounds.decode_step_s(load, batch)
    tokens_per_s = load.workload.requests_per_s * float(load.output_tokens.mean())
    pace_s = bounds.pace_s(load, batch)
    decode = int(np.ceil(tokens_per_s * pace_s / batch / lowest.layout.decode.lanes - 1e-9))
    unloaded = unloaded_checks(models, lowest, errors)
    left_s = min(each.limit_s - each.seconds for each in unloaded if each.metric == "ttft")
    slack_s = max(0.0, left_s - step_s) / errors.ttft
    level = max(slo.level for slo in slos.values())
    busy, service_s = models.busy(lowest, "prefill", errors), bounds.prompt_prefill_s(load)
    variation = float(np.mean(service_s**2)) / float(service_s.mean()) ** 2
    jobs = slack_s / (busy / load.prefill_requests_per_s)
    shape = lowest.layout.shapes["prefill"]

    def late(replicas: int) -> float:
        servers = replicas * shape.lanes
        spare = max(1e-9, servers - busy)
        queued = float(_erlang_c(servers, busy) * np.exp(-jobs * 2 * spare / variation))
        in_step = (
            0.0
            if shape.slicing.dp == 1
            else _erlang_c(replicas * shape.slicing.pp, busy) * max(0.0, 1 - jobs)
        )
        return max(queued, in_step)

    count = lowest.replicas["prefill"]
    while count < MAX_REPLICAS and late(count) > 1 - level:
        count += max(1, count // 32)
    return lowest.sized({"prefill": count, "decode": max(lowest.replicas["decode"], decode)})


def _erlang_c(servers: int, load: float) -> float:
    """Return the chance to wait in M/M/c at a load of so many busy servers."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def fluid_replicas(models: StepModels, lowest: Configuration, errors: StepErrors) -> Configuration:
    """
    Estimate the aggregated replicas that hold TPOT, where each prompt delays all other tokens.

        (docs/model.md, eq. T6)
    """
    load, chosen = models.load(lowest, errors), lowest
    limit_s = step_limit_s(load, models.inputs.scenario.promises) / load.tokens_per_step
    while (count := chosen.replicas["mixed"]) < MAX_REPLICAS:
        pace_s, batch = bounds.steady_decode(load, chosen.lanes("mixed"))
        if pace_s <= limit_s and batch < np.inf:
            break
        chosen = chosen.sized({"mixed": max(count + 1, int(count * 1.05))})
    return chosen


MAX_PLANS = 2
"""Multiple of the plan's GPUs up to which other sizes are searched."""


def sized_again(
    simulations: Simulations,
    best: Found,
    errors: StepErrors,
    floor: Configuration | None = None,
) -> Configuration | None:
    """Size a plan's layout by quick runs with other errors, from the sizes of *floor* on."""
    chosen, models = best.configuration, simulations.models
    if any(each.ratio > 1 for each in unloaded_checks(models, chosen, errors)):
        return None  # no number of replicas makes a single request quicker
    lowest = fewest_by_utilisation(models, chosen, errors)
    if floor is not None:
        least = lowest.replicas
        lowest = lowest.sized({role: max(least[role], floor.replicas[role]) for role in least})
    sizing = PoolSizing(
        simulations=simulations,
        errors=errors,
        quick=True,
        lowest=lowest,
        below=2 * MAX_PLANS * cost(models.inputs, chosen),
        max_gpus=MAX_PLANS * chosen.gpus,
    )
    if chosen.last == "mixed":
        return size_mixed_pool(sizing)
    # The plan's sizes, as much larger as their estimate is.
    before, after = (
        estimated_sizes(models, fewest_by_utilisation(models, chosen, each), each).replicas
        for each in (best.errors, errors)
    )
    guess = {
        role: max(lowest.replicas[role], round(count * after[role] / before[role]))
        for role, count in chosen.replicas.items()
    }
    return size_split_pools(sizing, chosen.sized(guess))


PROMPT_SHARES = (0.9, 0.75, 0.5)
"""Shares of the prompts that the thresholds tried keep from the prefill pool."""

MAX_RATIO = 0.95
"""Largest ratio of the limits' use to that without a threshold, where it saves no GPU."""


def choose_local_threshold(simulations: Simulations, plain: Found) -> Found:
    """
    Return the split configuration *plain* with a threshold where that is better, else as it is.

    Better: it holds the SLO as surely at less cost; or at the same, with TTFT at its percentile and
    the limit that is used up most both below 0.95 times the other's, simulated (docs/model.md,
    eq. L7). Layout and batch limit stay. No threshold is tried where all prompts are alike, where
    the scenario sets one, on a calibrated machine, where no prompt was timed in a decode replica,
    or with a library for experts, whose kernels in decode pools have room for few tokens.
    """
    inputs, chosen = simulations.inputs, plain.configuration
    given = inputs.scenario.search.local_threshold_tokens is not None
    untimed = inputs.calibration is not None or inputs.engine.all_to_all is not None
    if given or untimed or chosen.layout.prefill is None:
        return plain
    prompts = plain.models.load(chosen).all_tokens
    thresholds = [int(np.quantile(prompts, share, method="lower")) for share in PROMPT_SHARES]
    variants = [
        one_replica_each(simulations.models, chosen.layout, tokens)
        .limited(chosen.batch_limit)
        .sized(chosen.replicas)
        for tokens in dict.fromkeys(thresholds)
        if tokens < prompts.max()
    ]
    best = plain
    for each in variants:
        best = _cheaper(each, best, plain, simulations) or best
    if best is not plain:
        return best
    faster = (_faster(each, plain, simulations) for each in variants)
    return min(faster, key=lambda pair: pair[0], default=(1.0, plain))[1]


def _cheaper(
    variant: Configuration, best: Found, plain: Found, simulations: Simulations
) -> Found | None:
    """Size the pools with a threshold; `None` unless they cost less than *best*."""
    errors, below = plain.errors, cost(simulations.inputs, best.configuration)
    lowest = fewest_by_utilisation(simulations.models, variant, errors)
    sizing = PoolSizing(
        simulations=simulations,
        errors=errors,
        quick=False,
        lowest=lowest,
        below=below,
        max_gpus=best.configuration.gpus,
    )
    least, sizes = lowest.replicas, variant.replicas
    guess = variant.sized(
        {
            "prefill": max(least["prefill"], sizes["prefill"] - 1),
            "decode": max(least["decode"], sizes["decode"]),
        }
    )
    sized = size_split_pools(sizing, guess)
    found = None if sized is None else verified(simulations, sized, errors, below)
    return None if found is None else replace(best, configuration=found[0], verdicts=found[1])


def _faster(variant: Configuration, plain: Found, simulations: Simulations) -> tuple[float, Found]:
    """Return the ratio of TTFT with the threshold, and the result; 1 and *plain* if no better."""
    errors = plain.errors
    verdicts = under_seeds(simulations, variant, errors)
    if not verdicts[-1].holds:
        return 1.0, plain
    used = [_used(simulations, each, errors) for each in (variant, plain.configuration)]
    ratios = [after / before for after, before in zip(*used, strict=True)]
    if max(ratios) >= MAX_RATIO:
        return 1.0, plain
    return ratios[0], replace(plain, configuration=variant, verdicts=verdicts)


def _used(
    simulations: Simulations, chosen: Configuration, errors: StepErrors
) -> tuple[float, float]:
    """Return the used shares of the TTFT limit and of the tightest one, under the last seed."""
    run = simulations.run(chosen, errors, requests=VERIFY_REQUESTS, seed=VERIFY_SEED)
    if run is None:
        return 1.0, 1.0
    ttft = max(check.ratio for check, _ in run.limits if check.metric == "ttft")
    return ttft, run.tightest.ratio
