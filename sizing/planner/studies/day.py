"""A day, not a peak: the static pools of a plan against autoscaled ones, with cold starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.plan.scaling import (
    ScaledPool,
    held_intervals,
    scaled_pools,
    wanted_replicas,
)
from minicluster.specs.checks import not_negative
from minicluster.specs.scaling import HOLD_S, MARGIN
from minicluster.workload.day_profile import DAY_S
from sizing.planner.configuration import with_load
from sizing.planner.edge import least
from sizing.planner.plan import NoPlan, build_plan, search_within_budgets, sharing_classes
from sizing.planner.result import Infeasible
from sizing.planner.simulated_check import Simulations
from sizing.planner.step_models import StepModels
from sizing.planner.studies.defaults import ATTAINMENT, INTERVAL_S
from sizing.planner.workers import NO_WORKERS, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from minicluster.workload.day_profile import DayProfile
    from sizing.planner.configuration import Configuration
    from sizing.planner.error_model import StepErrors
    from sizing.planner.simulated_check import Found
    from sizing.planner.step_models import Steps

SHARES = tuple(tenth / 10 for tenth in range(11))
"""Static shares of each pool's replicas that are compared, rounded up."""

ENDLESS = 1 << 62
"""Simulated requests that a day may take: their number is bounded by that of its intervals."""

Replicas = tuple[int, ...]
"""Replicas of each pool, in the plan's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayOptions:
    """
    How a day is run.

    Attributes:
        cold_start_s: from the decision for a replica until it answers.
        forecast_error_fraction: each measured rate is off by up to this share, evenly spread.
        margin: of the policy, see `wanted_replicas`.
        hold_s: of the policy.
        attainment: share of the requests that are to find the SLO held.
    """

    cold_start_s: float
    forecast_error_fraction: float = 0.0
    margin: float = MARGIN
    hold_s: float = HOLD_S
    interval_s: float = INTERVAL_S
    attainment: float = ATTAINMENT
    seed: int = 0

    def __post_init__(self) -> None:
        """Check all values; errors name the options of `sizing day`."""
        not_negative(**{"--cold-start-seconds": self.cold_start_s})
        held_intervals(self.hold_s, 1.0, self.margin)
        count = DAY_S / self.interval_s if self.interval_s > 0 else 0.0
        if not (1 <= count <= DAY_S and count == int(count)):
            expected = "seconds that divide a day, from 1 on, for example 300"
            raise InputError("--interval-seconds", self.interval_s, expected)
        if not 0 <= self.forecast_error_fraction < 1:
            place, value = "--forecast-error", self.forecast_error_fraction
            raise InputError(place, value, "a fraction from 0 to below 1")
        if not 0 < self.attainment <= 1:
            raise InputError("--attainment", self.attainment, "a fraction above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRun:
    """
    One day with a static share of the replicas, and autoscaling above it.

    Attributes:
        static_fraction: of the plan's GPUs.
        static_gpus: that are always there.
        gpu_hours: from the decision for a replica to that against it.
        attained_fraction: share of the requests that come while the replicas that answer hold the
            SLO.
        gpus: paid for in each interval.
        replicas: by role, that answer in each interval.
        holds: whether they hold the SLO, by interval.
    """

    static_fraction: float
    static_gpus: int
    gpu_hours: float
    attained_fraction: float
    gpus: tuple[int, ...]
    replicas: dict[str, tuple[int, ...]]
    holds: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Day(Shown):
    """
    A day of static and of autoscaled pools.

    Attributes:
        layout: of the plan for the day's peak, as options of `sizing predict`.
        classes: of requests, which share the pools; 0: the load has none.
        static_gpus: of that plan.
        scaled: with one replica of each pool always there.
        runs: one for each static share, ascending; the last is the static pool.
        best: of these the least GPU-hours within the attainment that is asked for.
    """

    options: DayOptions
    layout: str
    static_gpus: int
    static_gpu_hours: float
    requests_per_s: tuple[float, ...]
    runs: tuple[DayRun, ...]
    best: DayRun
    classes: int

    @property
    def scaled(self) -> DayRun:
        """The day with autoscaling from one replica of each pool on."""
        return self.runs[0]


def day(
    inputs: Inputs,
    profile: DayProfile,
    options: DayOptions,
    *,
    workers: Workers = NO_WORKERS,
    progress: Callable[[int, int], None] | None = None,
) -> Day:
    """
    Compare the plan for a day's peak with autoscaling between one replica a pool and that plan.

    At the begin of each interval the policy of `serving scale --auto` decides from the rates of
    the intervals before; a new replica answers in the first interval that begins a cold start
    later. Whether the replicas that answer hold the SLO at an interval's rate is simulated
    (docs/model.md, eq. E5).

    Args:
        inputs: a scenario; the day's peak replaces its rate.
        profile: of the day, which repeats.
        workers: processes that simulate; they do not change the day.
        progress: is told how many numbers of replicas are simulated, and of how many.

    Raises:
        NoPlan: nothing holds the SLO at the peak.
        InputError: a scenario that cannot be planned at all.
        KeyboardInterrupt: Ctrl-C.

    Ignores:
        The time to drain a replica that goes; queues that an interval leaves to the next one.
    """
    classes = sharing_classes(inputs, "sizing day")
    load = inputs.scenario.workload.at_rate(profile.peak_requests_per_s)
    inputs = with_load(inputs, load)
    found = search_within_budgets(inputs, workers=workers)
    if isinstance(found, Infeasible):
        raise NoPlan(found)
    if found.interrupted:
        raise KeyboardInterrupt("no verified plan so far")
    plan = build_plan(inputs, found, workers)
    pools = scaled_pools(plan)
    starts_s = np.arange(0.0, DAY_S, options.interval_s, dtype=np.float64)
    rates = profile.at(np.asarray(starts_s + options.interval_s / 2, dtype=np.float64))
    floors = dict.fromkeys(
        tuple(max(1, math.ceil(share * pool.most - 1e-9)) for pool in pools) for share in SHARES
    )
    ordered = {floor: _ordered(pools, rates, floor, options) for floor in floors}
    answering = {floor: _answering(orders, options) for floor, orders in ordered.items()}
    asked = _asked(found, pools, answering.values(), rates)
    highest: dict[Replicas, float] = {}
    for count, rate in zip(asked, workers.map(_highest, asked.values()), strict=True):
        highest[count] = rate
        if progress is not None:
            progress(len(highest), len(asked))
    runs = [
        _run(pools, rates, floor, options, ordered[floor], answering[floor], highest)
        for floor in floors
    ]
    enough = [each for each in runs if each.attained_fraction >= options.attainment]
    return Day(
        options=options,
        classes=classes,
        layout=str(found.configuration),
        static_gpus=runs[-1].static_gpus,
        static_gpu_hours=runs[-1].gpu_hours,
        requests_per_s=tuple(rates.tolist()),
        runs=tuple(runs),
        best=min(enough, key=lambda each: each.gpu_hours),
    )


def _answering(ordered: NDArray[np.int64], options: DayOptions) -> list[Replicas]:
    """Return what was ordered a cold start ago and has not gone since, by interval."""
    late = math.ceil(options.cold_start_s / options.interval_s - 1e-9)
    answering = np.min([np.roll(ordered, ago, axis=0) for ago in range(late + 1)], axis=0)
    return [tuple(counts) for counts in answering.tolist()]


def _run(  # noqa: PLR0913, PLR0917  (one day: what was ordered, what answers, what holds)
    pools: Sequence[ScaledPool],
    rates: NDArray[np.float64],
    floor: Replicas,
    options: DayOptions,
    ordered: NDArray[np.int64],
    answering: list[Replicas],
    highest: dict[Replicas, float],
) -> DayRun:
    """Sum up the policy over a day that was like this one before."""
    holds = rates <= np.array([highest[count] for count in answering])
    gpus = ordered @ [pool.gpus for pool in pools]
    static = sum(count * pool.gpus for count, pool in zip(floor, pools, strict=True))
    return DayRun(
        static_fraction=static / sum(pool.most * pool.gpus for pool in pools),
        static_gpus=static,
        gpu_hours=float(gpus.sum()) * options.interval_s / 3600,
        attained_fraction=float(rates[holds].sum() / rates.sum()),
        gpus=tuple(gpus.tolist()),
        replicas={
            pool.role: tuple(counts)
            for pool, counts in zip(pools, zip(*answering, strict=True), strict=True)
        },
        holds=tuple(holds.tolist()),
    )


def _ordered(
    pools: Sequence[ScaledPool],
    rates: NDArray[np.float64],
    floor: Replicas,
    options: DayOptions,
) -> NDArray[np.int64]:
    """Return the replicas that the policy asks for, shape (intervals, pools)."""
    rng = np.random.default_rng(options.seed)
    error = options.forecast_error_fraction
    seen = rates * (1 + rng.uniform(-error, error, len(rates)))
    held = held_intervals(options.hold_s, options.interval_s, options.margin)
    least = {pool.role: count for pool, count in zip(pools, floor, strict=True)}
    ordered = []
    for at in range(len(rates)):
        before = seen.take(range(at - held, at), mode="wrap").tolist()
        wanted = wanted_replicas(pools, before, margin=options.margin, floor=least)
        ordered.append([wanted[pool.role] for pool in pools])
    return np.array(ordered)


class _Asked(NamedTuple):
    """Replicas, without spares, and the rates of the intervals that they answer in, descending."""

    inputs: Inputs
    steps: Steps
    chosen: Configuration
    errors: StepErrors
    rates: tuple[float, ...]


def _asked(
    planned: Found,
    pools: Sequence[ScaledPool],
    answering: Iterable[list[Replicas]],
    rates: NDArray[np.float64],
) -> dict[Replicas, _Asked]:
    by_count: dict[Replicas, set[float]] = {}
    for replicas in answering:
        for count, rate in zip(replicas, rates.tolist(), strict=True):
            by_count.setdefault(count, set()).add(rate)
    inputs, steps = planned.models.inputs, planned.models.known(planned.configuration)
    whole = tuple(pool.most for pool in pools)
    asked = {}
    for count, own_rates in by_count.items():
        needed = {
            pool.role: max(1, replicas - pool.spares)
            for replicas, pool in zip(count, pools, strict=True)
        }
        # The plan is for the highest rate of the day.
        descending = () if count == whole else tuple(sorted(own_rates, reverse=True))
        chosen = planned.configuration.sized(needed)
        asked[count] = _Asked(inputs, steps, chosen, planned.errors, descending)
    return asked


def _highest(asked: _Asked) -> float:
    """Return the highest of its rates that so many replicas hold; a lower one never fails."""
    if not asked.rates:
        return math.inf
    simulations = Simulations(StepModels(asked.inputs, asked.steps), requests=ENDLESS)

    def holds(at: int) -> bool:
        at_rate = simulations.at_rate(asked.rates[at])
        return at_rate.holds(asked.chosen, asked.errors, quick=True).holds

    # The highest first: mostly it holds.
    at = least(holds, 0, 0, len(asked.rates) - 1)
    return 0.0 if at is None else asked.rates[at]
