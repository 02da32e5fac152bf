"""Pareto fronts: configurations that no other one beats in both of two respects."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import InputError
from sizing.planner.candidates import largest_batch, list_candidates
from sizing.planner.configuration import Configuration
from sizing.planner.error_model import AS_PREDICTED
from sizing.planner.layout import profile_rule
from sizing.planner.predict import prediction_of, slo_misses
from sizing.planner.simulated_check import Simulations
from sizing.planner.step_models import StepModels, utilisations
from sizing.planner.workers import NO_WORKERS, Workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike

    from minicluster.plan import Inputs, Plan

UTILISATIONS = (0.9, 0.75, 0.5, 0.3)
"""Utilisations at which pools are sized: from few GPUs with long queues to many without."""

REQUESTS = 800
"""Simulated requests of a design point: its place in a picture, not a promise."""

BATCH_SHARES = (1.0, 0.5, 0.25)
"""Shares of the largest decode batch: they trade tokens/s per GPU for tokens/s per user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignPoint:
    """
    One configuration under the scenario's load, by a short simulation.

    Attributes:
        label: as `sizing predict` takes it.
        deployable: whether the engine profile allows it.
        power_w: of its GPUs; `None` where a GPU's power is unknown.
        price_usd_per_hour: `None` where the scenario gives no price.
        ttft_s, tpot_s: at the SLO's percentile.
        tokens_per_s_per_gpu: output tokens at the scenario's rate.
        tokens_per_s_per_user: 1 / mean TPOT; 0 where no answer has a second token.
    """

    label: str
    deployable: bool
    gpus: int
    power_w: float | None
    price_usd_per_hour: float | None
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    meets_slo: bool
    configuration: Configuration


def design_points(inputs: Inputs, plan: Plan | None = None) -> tuple[DesignPoint, ...]:
    """Return every design point, that of a *plan* too; those with the fewest GPUs first."""
    own = None if plan is None else Configuration.of_plan(plan)
    return sort_design_points(iter_design_points(inputs, own))


def sort_design_points(points: Iterable[DesignPoint]) -> tuple[DesignPoint, ...]:
    """Sort by GPUs, then latencies; of points with the same pools and figures the first is kept."""
    distinct: dict[tuple[object, ...], DesignPoint] = {}
    for point in points:
        figures = round(point.ttft_s, 6), round(point.tpot_s, 6)
        distinct.setdefault((point.label, *figures), point)
    return tuple(sorted(distinct.values(), key=lambda one: (one.gpus, one.ttft_s, one.tpot_s)))


def iter_design_points(
    inputs: Inputs, own: Configuration | None = None, workers: Workers = NO_WORKERS
) -> Iterator[DesignPoint]:
    """
    Simulate every legal layout, split and aggregated, at several batch limits and utilisations.

    Args:
        own: configuration of the scenario's plan, the first point.
        workers: processes that simulate; they do not change the points.

    Raises:
        InputError: the scenario cannot be planned at all.

    Ignores:
        The budget `cluster.max_gpus`.
    """
    candidates = list_candidates(StepModels(inputs), AS_PREDICTED)
    asked = [] if own is None else [_Sizes(inputs, own, exactly=True)]
    asked += [_Sizes(inputs, one) for one in (*candidates.split, *candidates.mixed)]
    yield from chain.from_iterable(workers.map(_simulated, asked))


class _Sizes(NamedTuple):
    """The smallest configuration of a layout, or the one that is *exactly* asked for."""

    inputs: Inputs
    one: Configuration
    exactly: bool = False


def _simulated(asked: _Sizes) -> list[DesignPoint]:
    simulations = Simulations(StepModels(asked.inputs))
    sizes = [asked.one] if asked.exactly else _sizes(simulations.models, asked.one)
    points = (_design_point(simulations, size) for size in dict.fromkeys(sizes))
    return [point for point in points if point is not None]


def _sizes(models: StepModels, smallest: Configuration) -> Iterator[Configuration]:
    """Yield batch limits and, for each, replicas at several utilisations."""
    most = max(1, largest_batch(models, smallest, AS_PREDICTED))
    for share in BATCH_SHARES:
        limited = smallest.limited(max(1, int(most * share)))
        needed = utilisations(models, limited).items()
        for used in UTILISATIONS:
            yield limited.sized({role: max(1, int(np.ceil(each / used))) for role, each in needed})


def _design_point(simulations: Simulations, chosen: Configuration) -> DesignPoint | None:
    """Simulate one configuration; `None` where a pool saturates."""
    models = simulations.models
    if max(utilisations(models, chosen).values()) >= 1:
        return None
    inputs = simulations.inputs
    outcome = simulations.outcome(chosen, AS_PREDICTED, requests=REQUESTS, seed=0)
    predicted = prediction_of(models, chosen, outcome)
    slo = inputs.scenario.slo
    return DesignPoint(
        label=str(chosen),
        deployable=profile_rule(inputs, chosen.layout) is None,
        gpus=chosen.gpus,
        power_w=inputs.power_w(chosen.gpus_by_kind),
        price_usd_per_hour=inputs.price_usd_per_hour(chosen.gpus_by_kind),
        ttft_s=predicted.ttft.at(slo.percentile),
        tpot_s=predicted.tpot.at(slo.percentile),
        output_tokens_per_s=predicted.output_tokens_per_s,
        tokens_per_s_per_gpu=predicted.output_tokens_per_s / chosen.gpus,
        tokens_per_s_per_user=0.0 if not predicted.tpot.mean_s else 1 / predicted.tpot.mean_s,
        meets_slo=not slo_misses(predicted, inputs.scenario.promises),
        configuration=chosen,
    )


COSTS = {"gpus": "GPUs", "usd": "US dollars a million output tokens", "watts": "W"}
WAYS_OUT = {
    "usd": "--set cluster.price_usd_per_gpu_hour=PRICE, or --set cost.prices=catalog",
    "watts": "power_w in configs/gpus",
}


def front(less: ArrayLike, also_less: ArrayLike) -> NDArray[np.bool_]:
    """
    Return which points are on the Pareto front.

    A point is beaten by one that is no worse in both respects and better in one.

    Args:
        less: better where smaller, shape (n,).
        also_less: better where smaller, shape (n,).

    Returns:
        Shape (n,); of equal points all are kept.

    Source:
        Definition; one pass over the points in the order of the first respect.
    """
    first, second = np.asarray(less, np.float64), np.asarray(also_less, np.float64)
    order = np.lexsort((second, first))
    kept = np.zeros(len(first), dtype=bool)
    best, at = np.inf, np.nan
    for point in order:
        equal = second[point] == best and first[point] == at
        if second[point] < best or equal:
            kept[point] = True
            best, at = second[point], first[point]
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """
    Design points in two respects, with their Pareto front.

    Attributes:
        x_name, y_name: name and unit of each respect.
        xs, ys: values of every design point, shape (n,).
        kept: which design points are on the front, shape (n,).
    """

    name: str
    x_name: str
    y_name: str
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]
    kept: NDArray[np.bool_]


def fronts(points: Sequence[DesignPoint], *, by: str = "gpus") -> tuple[Front, ...]:
    """
    Return the fronts of cost against TTFT and TPOT, and of tokens/s per GPU against per user.

    Args:
        by: what it costs: `gpus`, `usd` per million output tokens, or `watts`.

    Raises:
        InputError: a number that neither catalog nor scenario has.
    """
    cost, cost_name = _cost(points, by), COSTS[by]
    ttft, tpot = (np.array([getattr(p, name) for p in points]) for name in ("ttft_s", "tpot_s"))
    per_gpu = np.array([point.tokens_per_s_per_gpu for point in points])
    per_user = np.array([point.tokens_per_s_per_user for point in points])
    pairs = (
        ("cost against TTFT", (cost_name, cost, 1), ("TTFT, ms", 1e3 * ttft, 1)),
        ("cost against TPOT", (cost_name, cost, 1), ("TPOT, ms", 1e3 * tpot, 1)),
        (
            "throughput against pace",
            ("output tokens/s a user", per_user, -1),
            ("output tokens/s a GPU", per_gpu, -1),
        ),
    )
    return tuple(
        Front(name=name, x_name=x[0], y_name=y[0], xs=x[1], ys=y[1],
              kept=front(x[2] * x[1], y[2] * y[1]))
        for name, x, y in pairs
    )  # fmt: skip


def _cost(points: Sequence[DesignPoint], by: str) -> NDArray[np.float64]:
    if by == "gpus":
        return np.array([float(point.gpus) for point in points])
    found = [
        point.power_w
        if by == "watts"
        else None
        if point.price_usd_per_hour is None
        else 1e6 * point.price_usd_per_hour / (3600 * point.output_tokens_per_s)
        for point in points
    ]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        raise InputError(f"--by {by}", None, "the number for every GPU", WAYS_OUT[by])
    return np.array(known)
