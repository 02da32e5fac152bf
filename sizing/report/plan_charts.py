"""The charts of a plan's page, and the GPUs of its layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.pages.figure import (
    BLUE,
    ORANGE,
    POOL_COLOURS,
    SOFT,
    Figure,
    axes,
    axis,
    line,
    marks,
    thinned,
)
from minicluster.pages.latency import HEADROOM, LatencyCurve, latency_distribution
from minicluster.pages.page import GpuBox, NodeBox, NodeGrid
from minicluster.stats.shares import LEVELS
from sizing.planner.configuration import Configuration
from sizing.planner.studies.loss import placed_replicas
from sizing.planner.studies.pareto import DesignPoint, Front, fronts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from minicluster.plan import Plan
    from sizing.simulation.outcome import Outcome

CROWD = 3.0
"""The axes of a front end at this multiple of its largest value, unless the plan lies beyond."""
BINS = 160
"""Number of averages per line over time: a chart of 500 pixels cannot show more apart."""
MOST_NODES = 128
"""Maximum number of nodes drawn; further ones are only counted."""


def latency_figures(plan: Plan, outcome: Outcome, slowed: Outcome | None) -> Iterator[Figure]:
    """
    Draw which TTFT and TPOT a share of the simulated requests stays within, all classes together.

    Args:
        outcome: the simulation with the predicted step times.
        slowed: the simulation with the step times that the plan's confidence allows for; `None`
            where the plan has no confidence.
    """
    limits = {} if plan.workload.classes else plan.slo.limits_s
    for name in ("ttft", "tpot"):
        limit_s = limits.get(name)
        values = outcome.series(name)[0]
        if not len(values):
            continue
        curves = [LatencyCurve(name="simulated", values_s=values, colour=BLUE)]
        if slowed is not None:
            slow = slowed.series(name)[0]
            curves.append(
                LatencyCurve(name="with slowed steps", values_s=slow, colour=BLUE, dash="dot")
            )
        predicted = getattr(plan.prediction, name)
        yield latency_distribution(
            f"{name.upper()}: distribution",
            curves,
            predicted_s={share: predicted.at(each) for each, share in LEVELS.items()},
            limit=None if limit_s is None else (LEVELS[plan.slo.percentile], limit_s),
        )


def over_time_figures(plan: Plan, outcome: Outcome) -> Iterator[Figure]:
    """Draw queues, running sequences and KV cache of every pool over the simulated time."""
    seen = outcome.occupancy
    if len(seen.time_s) < 2:  # noqa: PLR2004  (a line takes two)
        return
    capacity = outcome.kv_capacity_blocks
    slots = {pool.role: pool.lanes * pool.max_num_seqs for pool in plan.pools}
    busy = {role: 100 * seen.running[role] / slots[role] for role in slots}
    used = {role: 100 * seen.kv_blocks[role] / capacity[role] for role in capacity}
    for title, name, pools in (
        ("Queues over time", "requests waiting", seen.waiting),
        ("Utilisation over time", "% of the pool's batch slots", busy),
        ("KV cache over time", "% of the pool's blocks", used),
    ):
        averaged = {role: _averaged(seen.time_s, each) for role, each in pools.items()}
        highest = {role: float(ys.max()) for role, (_, ys) in averaged.items()}
        top = HEADROOM * max(highest.values()) or 1.0
        said = ", ".join(f"{role} {high:,.3g}" for role, high in highest.items())
        yield Figure(
            title=title,
            caption=f"Highest of {BINS} averages: {said} {name}",
            traces=tuple(
                line(role, xs, ys, colour=POOL_COLOURS.get(role, SOFT), hover="%{y:.3g}")
                for role, (xs, ys) in averaged.items()
            ),
            layout=axes(
                axis("simulated time, s", float(seen.time_s[0]), float(seen.time_s[-1])),
                axis(name, 0.0, top),
                hovermode="x unified",
            ),
        )


def front_figures(points: Sequence[DesignPoint], plan: Plan) -> Iterator[Figure]:
    """Draw the alternatives: every configuration, those that no other dominates, and the plan."""
    if not points:
        return
    priced = plan.cost.price_usd_per_hour is not None
    own = Configuration.of_plan(plan)
    for found in fronts(points, by="usd" if priced else "gpus"):
        if found.name != "cost against TTFT" and not plan.prediction.tpot.mean_s:
            continue  # answers of one token have no TPOT
        yield front_figure(found, points, own)


def front_figure(
    found: Front, points: Sequence[DesignPoint], plan: Configuration | None = None
) -> Figure:
    """
    Draw configurations in two respects, a latency along x.

    Args:
        found: both figures of each configuration, and which ones no other dominates.
        points: the configurations, in the same order.
        plan: configuration of the plan, which is among them; `None` where there is no plan.
    """
    if found.y_name.endswith(", ms"):
        found = replace(found, x_name=found.y_name, y_name=found.x_name, xs=found.ys, ys=found.xs)
    places = [at for at, point in enumerate(points) if point.configuration == plan]
    chosen = (float(found.xs[places[0]]), float(found.ys[places[0]])) if places else None
    kept = np.flatnonzero(found.kept)
    kept = kept[np.argsort(found.xs[kept], kind="stable")]
    others = np.flatnonzero(~found.kept)
    others = others[thinned(len(others))]
    x_said, y_said = _reading(found.x_name, "%{x:,.4g}"), _reading(found.y_name, "%{y:,.4g}")
    hover = f"%{{text}}<br>{x_said}<br>{y_said}"
    traces = [
        marks(name, found.xs[places], found.ys[places], colour=colour, hover=hover,
              texts=[_said(points[at]) for at in places], size=size, opacity=opacity, lines=joined)
        for name, places, colour, size, opacity, joined in (
            ("another configuration", others, SOFT, 5, 0.45, False),
            ("no other beats it", kept, BLUE, 8, 1.0, True),
        )
        if len(places)
    ]  # fmt: skip
    said = f"{len(points):,} configurations, {len(kept)} of which no other beats"
    if chosen is not None:
        traces.append(
            marks("the plan", chosen[:1], chosen[1:], colour=ORANGE, hover=f"{x_said}<br>{y_said}",
                  size=13, symbol="diamond")
        )  # fmt: skip
        x_plan = _reading(found.x_name, f"{chosen[0]:,.4g}")
        said += f"; the plan: {x_plan}, {_reading(found.y_name, f'{chosen[1]:,.4g}')}"
    return Figure(
        title=f"Pareto: {found.name}",
        caption=said,
        traces=tuple(traces),
        layout=axes(
            axis(found.x_name, 0.0, _front_end(found.xs, found.kept, chosen[0] if chosen else 0)),
            axis(found.y_name, 0.0, _front_end(found.ys, found.kept, chosen[1] if chosen else 0)),
        ),
    )


def layout_grid(plan: Plan) -> NodeGrid:
    """Return every node with its GPUs, and which pool and replica has each."""
    taken = {
        (spot.node, gpu): (pool.role, replica)
        for pool in plan.pools
        for replica, spot in placed_replicas(pool)
        for gpu in spot.gpus
    }
    kinds = {spot.node: pool.gpu for pool in plan.pools for spot in pool.placement}
    several = len(set(kinds.values())) > 1
    nodes = list(dict.fromkeys(node for node, _ in sorted(taken, key=_order)))
    return NodeGrid(
        roles=tuple(pool.role for pool in plan.pools),
        nodes=tuple(
            NodeBox(
                f"{node}: {kinds[node]}" if several else node,
                tuple(
                    _gpu_box(node, gpu, taken.get((node, gpu)))
                    for gpu in range(plan.inputs.cluster.gpus_per_node)
                ),
            )
            for node in nodes[:MOST_NODES]
        ),
        more=max(0, len(nodes) - MOST_NODES),
    )


def _said(point: DesignPoint) -> str:
    slo = "holds the SLO" if point.meets_slo else "misses the SLO"
    batch = point.configuration.batch_limit
    return f"{point.label} batch {batch}: {point.gpus} GPUs, {slo}"


def _reading(name: str, value: str) -> str:
    """Write a value with the name of its axis: `TTFT 0.2 s`, `12 GPUs`."""
    what, comma, unit = name.partition(", ")
    return f"{what} {value} {unit}" if comma else f"{value} {what}"


def _front_end(values: NDArray[np.float64], kept: NDArray[np.bool_], chosen: float) -> float:
    """Return where an axis ends that holds the front, the plan and what is not far from them."""
    near = min(float(values.max()), CROWD * float(values[kept].max()))
    return HEADROOM * max(near, chosen) or 1.0


def _averaged(
    times: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Average over stretches of equal counts, so that lines can be read."""
    count = min(BINS, len(times))
    starts = np.arange(count) * len(times) // count
    sizes = np.diff(np.append(starts, len(times)))
    return np.add.reduceat(times, starts) / sizes, np.add.reduceat(values, starts) / sizes


def _order(place: tuple[str, int]) -> tuple[int, str, int]:
    """Sort node-2 before node-10."""
    node, gpu = place
    digits = node.rpartition("-")[2]
    return (int(digits) if digits.isdecimal() else 0, node, gpu)


def _gpu_box(node: str, gpu: int, taken: tuple[str, int] | None) -> GpuBox:
    role, replica = taken or ("free", None)
    said = role if replica is None else f"{role} replica {replica}"
    return GpuBox(role, replica, f"{node}, GPU {gpu}: {said}")
