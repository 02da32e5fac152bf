"""The charts of a plan's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.studies.cost import running
from sizing.planner.studies.pareto import fronts
from sizing.report.chart import Series, at_tail, chart, horizontal, tail, vertical

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from minicluster.plan import Plan
    from sizing.planner.evaluated import Evaluated
    from sizing.planner.studies.pareto import Front
    from sizing.report.axes import Axis
    from sizing.simulation.outcome import Outcome

LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
MS = 1e3
CROWD = 3.0
"""Axes of fronts end at so many times what the front reaches: beyond lies what nobody wants."""
BINS = 160
"""Moments over which queues are averaged for the drawing."""


def legend(styles: Sequence[str]) -> str:
    """Name the colours."""
    inner = "".join(f'<span><i class="{each}"></i>{each}</span>' for each in styles)
    return f'<div class="legend">{inner}</div>'


def latency_charts(
    plan: Plan, outcome: Outcome, slowed: Outcome | None
) -> Iterator[tuple[str, str]]:
    """
    Draw which TTFT and TPOT a share of the simulated requests stays within.

    Args:
        plan: its forecast and limits.
        outcome: with the step times predicted.
        slowed: with those that the plan's confidence allows for; `None`: it says nothing.
    """
    for name, limit_s in (("ttft", plan.slo.ttft_s), ("tpot", plan.slo.tpot_s)):
        values = np.sort(outcome.series(name)[0])
        if not len(values):
            continue
        predicted = getattr(plan.prediction, name)
        forecast = np.array([predicted.at(each) for each in LEVELS])
        x = tail(len(values), "share of requests within")
        runs = {"simulated": values}
        if slowed is not None:
            runs["slowed"] = np.sort(slowed.series(name)[0])
        highest = max(float(forecast[-1]), limit_s or 0.0, *(float(v[-1]) for v in runs.values()))
        y = vertical(1.05 * highest * MS, "ms")
        marks = Series(
            style="predicted",
            xs=np.array([at_tail(each) for each in LEVELS.values()]),
            ys=forecast * MS,
            marks=True,
            titles=tuple(f"{each}: {predicted.at(each) * MS:.1f} ms" for each in LEVELS),
        )
        curves = [_tail_curve(style, each, x.high) for style, each in runs.items()]
        limit = None if limit_s is None else limit_s * MS
        styles = (*runs, "predicted", *(() if limit is None else ("limit",)))
        drawing = chart(x, y, (*curves, marks), limit=limit)
        yield f"{name.upper()}: distribution", legend(styles) + drawing


def _tail_curve(style: str, ordered: NDArray[np.float64], most: float) -> Series:
    """
    Return which value a share of *ordered* stays within.

    The k-th of n values is what k/n of them stay within; the last would lie at infinity.
    """
    kept = _tail_places(len(ordered))
    shares = -np.log10(1 - (kept + 0.5) / len(ordered))
    return Series(style=style, xs=np.minimum(shares, most), ys=ordered[kept] * MS)


def over_time_charts(plan: Plan, outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Draw queues, running sequences and KV cache of every pool over the simulated time."""
    seen = outcome.occupancy
    if len(seen.time_s) < 2:  # noqa: PLR2004  (a line takes two)
        return
    capacity = outcome.kv_capacity_blocks
    slots = {pool.role: pool.lanes * pool.max_batch_size for pool in plan.pools}
    busy = {role: 100 * seen.running[role] / slots[role] for role in slots}
    used = {role: 100 * seen.kv_blocks[role] / capacity[role] for role in capacity}
    for title, name, pools in (
        ("Queues over time", "requests waiting", seen.waiting),
        ("Utilisation over time", "% of the pool's batch slots", busy),
        ("KV cache over time", "% of the pool's blocks", used),
    ):
        lines = [
            Series(style=role, xs=times, ys=values)
            for role, each in pools.items()
            for times, values in (_binned(seen.time_s, each),)
        ]
        x = horizontal(float(seen.time_s[0]), float(seen.time_s[-1]), "simulated time, s")
        y = vertical(1.05 * max(float(line.ys.max()) for line in lines), name)
        yield title, legend(tuple(pools)) + chart(x, y, lines)


def fronts_charts(plan: Plan, points: Sequence[Evaluated]) -> Iterator[tuple[str, str]]:
    """Draw what else there was: every configuration, those that no other beats, the plan."""
    if not points:
        return
    priced = plan.cost.price_usd_per_hour is not None
    for found in fronts(points, by="usd" if priced else "gpus"):
        if found.name != "cost against TTFT" and not plan.prediction.tpot.mean_s:
            continue  # answers of one token have no pace
        x, y = _front_axis(found, 0), _front_axis(found, 1)
        places = np.flatnonzero(found.kept)
        places = places[np.argsort(found.xs[places])]
        chosen = _plan_point(plan, found)
        titles = tuple(_title(points[at]) for at in places)
        series = [
            Series(style="other", xs=found.xs, ys=found.ys, marks=True),
            Series(style="edge", xs=found.xs[places], ys=found.ys[places]),
            Series(style="front", xs=found.xs[places], ys=found.ys[places], marks=True,
                   titles=titles),
            Series(style="plan", xs=np.array([chosen[0]]), ys=np.array([chosen[1]]), marks=True,
                   titles=("the plan",)),
        ]  # fmt: skip
        drawing = chart(x, y, series)
        yield f"Pareto: {found.name}", legend(("front", "other", "plan")) + drawing


def _title(point: Evaluated) -> str:
    """Name a configuration."""
    slo = "holds the SLO" if point.meets_slo else "misses the SLO"
    return f"{point.label}: {point.gpus} GPUs, {slo}"


def _front_axis(found: Front, at: int) -> Axis:
    """Return an axis that holds the front, and what is not far from it."""
    values = (found.xs, found.ys)[at]
    reached = float(values[found.kept].max())
    high = min(float(values.max()), CROWD * reached)
    name = (found.x_name, found.y_name)[at]
    return horizontal(0.0, 1.05 * high, name) if at == 0 else vertical(1.05 * high, name)


def _plan_point(plan: Plan, found: Front) -> tuple[float, float]:
    """Return where the plan lies."""
    statistic, prediction = plan.slo.percentile, plan.prediction
    cost = running(plan).usd_per_million_output_tokens
    x = float(plan.cost.gpus) if found.x_name == "GPUs" or cost is None else cost
    if found.name == "cost against TTFT":
        return x, prediction.ttft.at(statistic)
    if found.name == "cost against TPOT":
        return x, prediction.tpot.at(statistic)
    return 1 / prediction.tpot.mean_s, prediction.output_tokens_per_s / plan.cost.gpus


def _tail_places(count: int) -> NDArray[np.int64]:
    """Return ranks to draw: every one of the last hundredth, some of the others."""
    body = np.linspace(0, count - 1, min(count, 400)).astype(np.int64)
    last = np.linspace(int(0.99 * count), count - 1, min(count, 300)).astype(np.int64)
    return np.unique(np.concatenate([body, last]))


def _binned(
    times: NDArray[np.float64],
    values: NDArray[np.float64],
) -> tuple[NDArray[np.float64], ...]:
    """Average over stretches of equal counts, so that lines can be read."""
    count = min(BINS, len(times))
    starts = np.arange(count) * len(times) // count
    sizes = np.diff(np.append(starts, len(times)))
    return np.add.reduceat(times, starts) / sizes, np.add.reduceat(values, starts) / sizes
