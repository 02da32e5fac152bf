"""Answers of `sizing capacity`, `split-map`, `decisions` and `day`: tables and lines, pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from minicluster.pages.figure import BLUE, PALE, RED, Figure, axes, axis, contour, heat_map
from minicluster.units import seconds
from sizing.planner.studies.decisions import Decisions, needed
from sizing.planner.studies.result import StudyResult, figures
from sizing.planner.studies.split_map import UNSIZED, SplitMap, SplitPoint
from sizing.report.study import FROM_ZERO, charts_page, latency, number, series_figure
from sizing.report.tables import columns_table, interval, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray
    from rich.table import Table

    from minicluster.pages.page import Page
    from sizing.planner.studies.capacity import Capacity, CapacityPoint
    from sizing.planner.studies.day import Day

LEFT = ("layout", "then binds", "decision", "changed to", "what binds")
NO_PRICE = (
    "no price: --set cluster.price_usd_per_gpu_hour=PRICE, or cost.prices=catalog, gives $ per"
    " million output tokens"
)
BREAK_EVEN = -0.5
"""Per cent at which the line is drawn: just below zero, because whole replicas often tie."""
OWN = "own pools of each class"
"""Layout of classes of requests that share no pools."""
PARTIAL = "partial: interrupted before the last of what was asked"
"""Line of an answer that was stopped."""
SURE = 0.8
"""Confidence below which the sign of a point of a map is marked as open."""


# --- capacity


def capacity_parts(found: Capacity) -> Iterator[Table | str]:
    """Yield one row per number of GPUs, and what the figures rest on."""
    yield _capacity_table(found)
    if found.interrupted:
        yield PARTIAL
    sure = "simulated with steps as calibrated"
    if found.confidence_fraction is not None:
        own = ", for each class by itself" if any(each.own for each in found.points) else ""
        sure = f"{found.confidence_fraction:.0%} confidence that the SLO holds at each rate{own}"
    yield f"{sure}; users think {found.think_s:.3g} s between an answer and the next request"
    costs = [each.running for each in found.points if each.running is not None]
    if costs and costs[0].usd_per_hour is None:
        yield NO_PRICE
    elif costs:
        yield (
            f"$: {costs[0].price_source}, per million output tokens; every GPU is paid for and"
            " draws full power all the time"
        )


def _capacity_table(found: Capacity) -> Table:
    at = found.percentile
    heads = ["GPUs", "used", "requests/s", "users", "tokens/s", "J/token"]
    priced = [each for each in found.points if each.running and each.running.usd_per_hour]
    heads += ["$/Mtok"] if priced else []
    heads += [f"TTFT {at}", "80 % interval", f"TPOT {at}", "layout", "then binds"]
    made = table("Highest rate within the SLO", heads, (), left=LEFT, whole=("layout",))
    for each in found.points:
        made.add_row(*_capacity_cells(str(each.gpus), each, at, priced=bool(priced)))
        for name, one in each.own.items():
            made.add_row(*_capacity_cells(name, one, at, priced=bool(priced)))
    return made


def _capacity_cells(
    name: str, point: CapacityPoint, at: str, *, priced: bool
) -> Iterator[str | Text]:
    predicted, cost = point.prediction, point.running
    if cost is None:
        yield from (name, "")
        yield Text("none", style="red")
        yield from ("",) * (8 if priced else 7)
        yield point.reason
        return
    yield from (name, str(point.used_gpus), f"{point.requests_per_s:,.4g}")
    yield from (f"{point.users:,.0f}", f"{point.output_tokens_per_s:,.0f}")
    yield number(cost.joules_per_output_token)
    if priced:
        yield number(cost.usd_per_million_output_tokens)
    if predicted is None:
        yield from ("", "", "", OWN, point.binds)
        return
    yield from (seconds(predicted.ttft.at(at)), interval(predicted.ttft, at))
    yield from (seconds(predicted.tpot.at(at)), point.layout, point.binds)


def capacity_page(scenario: str, found: Capacity) -> Page:
    """Return the page of a capacity curve."""
    known = [each for each in found.points if each.requests_per_s]
    best = known[-1] if known else None
    headline = f"No number of GPUs asked for holds the SLO of {scenario}"
    if best is not None:
        headline = f"{best.gpus} GPUs carry {best.requests_per_s:,.4g} requests/s of {scenario}"
    gpus, x_axis = [float(each.gpus) for each in known], axis("GPUs") | FROM_ZERO
    charts = (
        series_figure(title, {title: (gpus, values)}, x_axis, axis(unit) | FROM_ZERO, unit=unit)
        for title, unit, values in (
            ("Highest rate", "requests/s", [each.requests_per_s for each in known]),
            ("Users", "users", [each.users for each in known]),
        )
        if known
    )
    title, parts = f"{scenario}: capacity", capacity_parts(found)
    return charts_page(title, headline, *charts, *parts, command="capacity")


# --- split map


def split_map_parts(found: SplitMap) -> Iterator[Table | str]:
    """
    Yield the map: what splitting saves, or costs (negative), and the confidence of the sign.

    Lines below it say what its words mean, and why points have no pools.
    """
    title = f"Saved by splitting, share of {found.objective}; ? where the sign is open"
    made = table(title, (f"{found.y.key}\n{found.x.key} →", *found.x.values), ())
    for y, row in _rows(found):
        made.add_row(y, *(_split_cell(each) for each in row))
    yield made
    if found.interrupted:
        yield PARTIAL
    yield from _sharing(found.classes)
    words = {cell.plain for _, row in _rows(found) for cell in map(_split_cell, row)}
    yield "In brackets: chance that the sign is right, from the error model of the plans"
    if "aggregated" in words:
        yield "aggregated: split pools miss the SLO, or cost twice as much or more"
    if "split" in words:
        yield "split: aggregated pools miss the SLO"
    reasons = {each.reason for each in found.points} - {"", UNSIZED}
    yield from sorted(f"none: {each}" for each in reasons)


def _rows(found: SplitMap) -> list[tuple[str, Sequence[SplitPoint]]]:
    width = len(found.x.values)
    return [(y, found.points[at * width : (at + 1) * width]) for at, y in enumerate(found.y.values)]


def _split_cell(point: SplitPoint) -> Text:
    """Write one cell: `+25% 97%`."""
    saved = point.saved_fraction
    if point.reason == UNSIZED:
        return Text("")
    if saved is None or point.confidence_fraction is None:
        if point.mixed_gpus is not None:
            return Text("aggregated", style="red")
        return Text("split", style="green") if point.split_gpus is not None else Text("none")
    if not saved:
        return Text("equal")
    sure = point.confidence_fraction
    style = "" if sure < SURE else "green" if saved > 0 else "red"
    return Text(f"{saved:+.0%}{'?' if sure < SURE else ''} ({sure:.0%})", style=style)


def _sharing(classes: int) -> Iterable[str]:
    """Say of classes of requests that pools of their own were not looked at."""
    if classes:
        yield f"the {classes} classes of requests share pools here; own pools were not looked at"


def split_map_page(scenario: str, found: SplitMap) -> Page:
    """Return the page of a map, with the line where both cost the same."""
    pays = sum((each.saved_fraction or 0) > 0 for each in found.points)
    return charts_page(
        f"{scenario}: where splitting pays",
        f"Splitting pays at {pays} of {len(found.points)} points of {scenario}",
        _map_figure(found),
        *split_map_parts(found),
        command="split-map",
    )


def _map_figure(found: SplitMap) -> Figure:
    rows = _rows(found)
    percent = [[_drawn_percent(each) for each in row] for _, row in rows]
    texts = [[f"{_split_cell(each).plain}: {_gpus(each)}" for each in row] for _, row in rows]
    name = "saved by splitting, %"
    hover = f"%{{z:.0f}} % of {found.objective}; %{{text}}"
    return Figure(
        title="Saved by splitting",
        caption=f"Saved by splitting, % of {found.objective}, over {found.x.key} and"
        f" {found.y.key}; beyond the line split pools cost no more than aggregated ones",
        traces=(
            heat_map(name, percent, texts, hover=hover, colours=(RED, PALE, BLUE)),
            contour("break-even", percent, at=BREAK_EVEN),
        ),
        layout=axes(_ticks(found.x.key, found.x.values), _ticks(found.y.key, found.y.values)),
    )


def _drawn_percent(point: SplitPoint) -> float:
    """Return what splitting saves; where one kind is missing, the most that a map shows."""
    if point.saved_fraction is not None:
        return 100 * point.saved_fraction
    if not (point.mixed_gpus or point.split_gpus):
        return float("nan")
    return 50.0 if point.mixed_gpus is None else -50.0


def _gpus(point: SplitPoint) -> str:
    kinds = {"split": point.split_gpus, "aggregated": point.mixed_gpus}
    return ", ".join(
        f"{'no' if gpus is None else gpus} GPUs {kind}" for kind, gpus in kinds.items()
    )


def _ticks(key: str, values: Sequence[str]) -> dict[str, Any]:
    return axis(key) | {"tickvals": list(range(len(values))), "ticktext": list(values)}


# --- decisions


def decisions_parts(found: Decisions) -> Iterator[Table | str]:
    """Yield one row per change, the fewest GPUs first, the plan as given between them."""
    heads = ("decision", "changed to", "GPUs", "against", "TTFT", "TPOT", "what binds")
    made = table("Planned anew with one thing changed", heads, (), left=LEFT)
    base = needed(found.base)
    cells = [
        (row.gpus, 1, (row.name, row.value, *_needed(row.result, row.against_gpus)))
        for row in found.rows
    ]
    cells.append((base, 0, ("as given", "", *_needed(found.base, None))))
    cells.sort(key=lambda each: (each[0] is None, each[0] or 0, each[1]))
    for _, changed, row in cells:
        made.add_row(*row, style=None if changed else "bold")
    yield made
    if found.interrupted:
        yield PARTIAL
    yield "Planned anew with one thing changed at a time."


def _needed(answer: StudyResult, against: int | None) -> tuple[str, ...]:
    """Return GPUs needed, the change, latencies and the first limit."""
    gpus = needed(answer)
    first = ("none" if gpus is None else str(gpus), "" if against is None else f"{against:+d}")
    if not answer.plans:
        return (*first, "", "", answer.reason)
    found = figures(answer.plans)
    return (*first, latency(found.ttft_s), latency(found.tpot_s), found.binds)


def decisions_page(scenario: str, found: Decisions) -> Page:
    """Return the page of decisions: a bar each."""
    known = [each for each in found.rows if each.against_gpus]
    names = [f"{each.name}: {each.value.rpartition('=')[2]}" for each in known]
    bars = {"GPUs more": (names, [float(each.against_gpus or 0) for each in known])}
    base, x_axis = needed(found.base), axis("") | {"tickangle": -30}
    chart = series_figure("GPUs more than as given", bars, x_axis, axis("GPUs"), unit="GPUs")
    return charts_page(
        f"{scenario}: decisions",
        f"{scenario} as given: {'no plan' if base is None else f'{base} GPUs'}",
        *([chart] if known else []),
        *decisions_parts(found),
        command="decisions",
    )


# --- day


HOURS = 24


def day_parts(found: Day) -> Iterator[Table | str]:
    """Yield the answer in one sentence, what it rests on, the static shares, the best one's day."""
    yield _day_headline(found)
    yield from _day_lines(found)
    yield _shares_table(found)
    yield _hours_table(found)


def _day_headline(found: Day) -> str:
    best, whole = found.best, found.static_gpu_hours
    if best is found.runs[-1]:
        return (
            f"The static pool, {found.static_gpus} GPUs and {whole:,.0f} GPU-hours a day: no"
            " smaller static share keeps the attainment"
        )
    return (
        f"{best.gpu_hours:,.0f} GPU-hours a day with autoscaling, {whole:,.0f} with"
        f" {found.static_gpus} static GPUs: {1 - best.gpu_hours / whole:.0%} fewer;"
        f" {best.attained_fraction:.2%} of requests find the SLO held"
    )


def _day_lines(found: Day) -> Iterable[str]:
    """Yield why the best static share is the best, and what the figures rest on."""
    best, asked = found.best, found.options
    reason = f"best static share: {best.static_fraction:.0%}, {best.static_gpus} GPUs"
    less = found.runs[: found.runs.index(best)]
    missing = [each for each in less if each.attained_fraction < asked.attainment]
    if missing:
        yield (
            f"{reason}; with {missing[-1].static_gpus} only"
            f" {missing[-1].attained_fraction:.2%} of requests find the SLO held,"
            f" {asked.attainment:.2%} are asked for"
        )
    else:
        yield f"{reason}: one replica of each pool is enough, more take more GPU-hours"
    yield f"plan for the peak: {found.layout}"
    yield from _sharing(found.classes)
    yield (
        f"cold start {asked.cold_start_s:g} s, forecast error up to"
        f" {asked.forecast_error_fraction:.0%}; the policy decides every {asked.interval_s:g} s,"
        f" with a margin of {asked.margin:.0%}, and holds replicas for {asked.hold_s:g} s"
    )


def _shares_table(found: Day) -> Table:
    """Return one row for each static share."""
    best, runs = found.best, found.runs
    columns = {
        "static share": [f"{each.static_fraction:.0%}" for each in runs],
        "static GPUs": [str(each.static_gpus) for each in runs],
        "GPU-hours": [f"{each.gpu_hours:,.1f}" for each in runs],
        "fewer": [f"{1 - each.gpu_hours / found.static_gpu_hours:.0%}" for each in runs],
        "SLO held": [f"{each.attained_fraction:.2%}" for each in runs],
        "": ["best" if each is best else "" for each in runs],
    }
    return columns_table("Static share, autoscaled above it; SLO held: of requests", columns)


def _hours_table(found: Day) -> Table:
    """Return one row an hour of the best share's day."""
    best = found.best
    columns = {
        "hour": [str(hour) for hour in range(HOURS)],
        "requests/s": [f"{each:,.4g}" for each in _hourly(found.requests_per_s)],
        "static GPUs": [str(found.static_gpus)] * HOURS,
        "GPUs": [f"{each:,.1f}" for each in _hourly(best.gpus)],
        **{
            f"{role} answer": [f"{each:,.1f}" for each in _hourly(counts)]
            for role, counts in best.replicas.items()
        },
        "SLO held": [f"{each:.1%}" for each in _attained(found)],
    }
    return columns_table(f"The day at a static share of {best.static_fraction:.0%}", columns)


def day_page(scenario: str, found: Day) -> Page:
    """Return the page of a day: rates, GPUs and attainment by the hour."""
    hours = [float(hour) for hour in range(HOURS)]
    static = [float(found.static_gpus)] * HOURS
    gpus = {
        "static": (hours, static),
        "autoscaled": (hours, _hourly(found.best.gpus).tolist()),
    }
    charts = (
        series_figure(title, series, axis("hour"), axis(unit) | FROM_ZERO, unit=unit)
        for title, unit, series in (
            ("Rate", "requests/s", {"rate": (hours, _hourly(found.requests_per_s).tolist())}),
            ("GPUs", "GPUs", gpus),
            ("SLO held", "% of requests", {"held": (hours, (100 * _attained(found)).tolist())}),
        )
    )
    headline, *parts = day_parts(found)
    return charts_page(f"{scenario}: a day", str(headline), *charts, *parts, command="day")


def _hourly(values: ArrayLike) -> NDArray[np.float64]:
    """Return the mean of each hour; intervals longer than one stand for all their hours."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < HOURS:
        return np.asarray(array[np.arange(HOURS) * len(array) // HOURS])
    hours = np.arange(len(array)) * HOURS // len(array)
    return np.asarray(np.bincount(hours, array, HOURS) / np.bincount(hours, minlength=HOURS))


def _attained(found: Day) -> NDArray[np.float64]:
    """Return the share of each hour's requests that find the SLO held, on the best share's day."""
    rates = np.asarray(found.requests_per_s)
    asked = np.maximum(_hourly(rates), 1e-12)
    return np.asarray(_hourly(rates * np.asarray(found.best.holds)) / asked)
