"""Tables and pages of `sizing capacity`, `split-map` and `decisions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from minicluster.pages.figure import BLUE, PALE, RED, Figure, axes, axis, contour, heat_map
from minicluster.pages.page import ChartRow, Page
from minicluster.units import seconds
from sizing.planner.studies.decisions import needed
from sizing.planner.studies.result import figures
from sizing.planner.studies.split_map import UNSIZED
from sizing.report.series_chart import series_figure
from sizing.report.tables import interval, table, titled_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.table import Table

    from sizing.planner.studies.capacity import Capacity, CapacityPoint
    from sizing.planner.studies.decisions import Decisions
    from sizing.planner.studies.result import StudyResult
    from sizing.planner.studies.split_map import SplitMap, SplitPoint

LEFT = ("layout", "then binds", "decision", "changed to", "what binds")
NO_PRICE = (
    "no price: --set cluster.price_usd_per_gpu_hour=PRICE, or cost.prices=catalog, gives $ per"
    " million output tokens"
)
BREAK_EVEN = -0.5
"""Per cent at which the line is drawn: just below zero, because whole replicas often tie."""
PARTIAL = "partial: interrupted before the last of what was asked"
"""Line of an answer that was stopped."""
SURE = 0.8
"""Confidence below which the sign of a point of a map is marked as open."""


# --- capacity


def capacity_table(found: Capacity) -> Table:
    """Return one row per number of GPUs."""
    at = found.percentile
    heads = ["GPUs", "used", "requests/s", "users", "tokens/s", "J/token"]
    priced = [each for each in found.points if each.running and each.running.usd_per_hour]
    heads += ["$/Mtok"] if priced else []
    heads += [f"TTFT {at}", "80 % interval", f"TPOT {at}", "layout", "then binds"]
    made = table("Highest rate within the SLO", heads, (), left=LEFT, whole=("layout",))
    for each in found.points:
        made.add_row(*_capacity_cells(each, at, priced=bool(priced)))
    return made


def _capacity_cells(point: CapacityPoint, at: str, *, priced: bool) -> Iterable[str | Text]:
    predicted, cost = point.prediction, point.running
    if predicted is None or cost is None:
        yield str(point.gpus)
        yield from ("", Text(f"none: {point.reason}", style="red"))
        return
    yield from (str(point.gpus), str(point.used_gpus), f"{point.requests_per_s:,.4g}")
    yield from (f"{point.users:,.0f}", f"{predicted.output_tokens_per_s:,.0f}")
    yield _number(cost.joules_per_output_token)
    if priced:
        yield _number(cost.usd_per_million_output_tokens)
    yield from (seconds(predicted.ttft.at(at)), interval(predicted.ttft, at))
    yield from (seconds(predicted.tpot.at(at)), point.layout, point.binds)


def capacity_lines(found: Capacity) -> Iterable[str]:
    """Yield what the figures rest on."""
    if found.interrupted:
        yield PARTIAL
    yield (
        f"{found.confidence_fraction:.0%} confidence that the SLO holds at each rate; users think"
        f" {found.think_s:g} s between an answer and the next request"
    )
    costs = [each.running for each in found.points if each.running is not None]
    if costs and costs[0].usd_per_hour is None:
        yield NO_PRICE
    elif costs:
        yield (
            f"$: {costs[0].price_source}, per million output tokens; every GPU is paid for and"
            " draws full power all the time"
        )


def capacity_page(scenario: str, found: Capacity) -> Page:
    """Return the page of a capacity curve."""
    known = [each for each in found.points if each.prediction is not None]
    best = known[-1] if known else None
    headline = f"No number of GPUs asked for holds the SLO of {scenario}"
    if best is not None:
        headline = f"{best.gpus} GPUs carry {best.requests_per_s:,.4g} requests/s of {scenario}"
    drawn: tuple[tuple[str, str, Callable[[CapacityPoint], float]], ...] = (
        ("Highest rate", "requests/s", lambda each: each.requests_per_s),
        ("Users", "users", lambda each: each.users),
    )
    charts = [
        series_figure(
            title,
            {title: ([float(each.gpus) for each in known], [value(each) for each in known])},
            axis("GPUs") | {"rangemode": "tozero"},
            axis(unit) | {"rangemode": "tozero"},
            unit=unit,
        )
        for title, unit, value in (drawn if known else ())
    ]
    return Page(
        title=f"{scenario}: capacity",
        headline=headline,
        lines=tuple(capacity_lines(found)),
        parts=(ChartRow(tuple(charts)), titled_section(capacity_table(found))),
        footer="minicluster, sizing capacity",
    )


# --- split map


def split_map_table(found: SplitMap) -> Table:
    """Return the map: what splitting saves, or costs (negative), and the confidence of the sign."""
    title = f"Saved by splitting, share of {found.objective}; ? where the sign is open"
    made = table(title, (f"{found.y.key}\n{found.x.key} →", *found.x.values), ())
    for y, row in _rows(found):
        made.add_row(y, *(_split_cell(each) for each in row))
    return made


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


def split_map_lines(found: SplitMap) -> Iterable[str]:
    """Yield what the words in the map mean, and reasons of points without pools."""
    if found.interrupted:
        yield PARTIAL
    words = {cell.plain for _, row in _rows(found) for cell in map(_split_cell, row)}
    yield "In brackets: chance that the sign is right, from the error model of the plans"
    if "aggregated" in words:
        yield "aggregated: split pools miss the SLO, or cost twice as much or more"
    if "split" in words:
        yield "split: aggregated pools miss the SLO"
    reasons = {each.reason for each in found.points} - {"", UNSIZED}
    yield from sorted(f"none: {each}" for each in reasons)


def split_map_page(scenario: str, found: SplitMap) -> Page:
    """Return the page of a map, with the line where both cost the same."""
    pays = sum((each.saved_fraction or 0) > 0 for each in found.points)
    return Page(
        title=f"{scenario}: where splitting pays",
        headline=f"Splitting pays at {pays} of {len(found.points)} points of {scenario}",
        lines=tuple(split_map_lines(found)),
        parts=(ChartRow((_map_figure(found),)), titled_section(split_map_table(found))),
        footer="minicluster, sizing split-map",
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
    saved = point.saved_fraction
    if saved is None:
        saved = -0.5 if point.mixed_gpus is not None else 0.5
        return 100 * saved if point.mixed_gpus or point.split_gpus else float("nan")
    return 100 * saved


def _gpus(point: SplitPoint) -> str:
    kinds = {"split": point.split_gpus, "aggregated": point.mixed_gpus}
    return ", ".join(
        f"{'no' if gpus is None else gpus} GPUs {kind}" for kind, gpus in kinds.items()
    )


def _ticks(key: str, values: Sequence[str]) -> dict[str, Any]:
    return axis(key) | {"tickvals": list(range(len(values))), "ticktext": list(values)}


# --- decisions


def decisions_table(found: Decisions) -> Table:
    """Return one row per change, the fewest GPUs first, the plan as given between them."""
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
    return made


def _needed(answer: StudyResult, against: int | None) -> tuple[str, ...]:
    """Return GPUs needed, the change, latencies and the first limit."""
    gpus = needed(answer)
    first = ("none" if gpus is None else str(gpus), "" if against is None else f"{against:+d}")
    if answer.plan is None:
        return (*first, "", "", answer.reason)
    found = figures(answer.plan)
    return (*first, seconds(found.ttft_s), seconds(found.tpot_s), found.binds)


def decisions_lines(found: Decisions) -> Iterable[str]:
    """Yield what was done."""
    if found.interrupted:
        yield PARTIAL
    yield "Planned anew with one thing changed at a time."


def decisions_page(scenario: str, found: Decisions) -> Page:
    """Return the page of decisions: a bar each."""
    known = [each for each in found.rows if each.against_gpus]
    names = [f"{each.name}: {each.value.rpartition('=')[2]}" for each in known]
    bars = {"GPUs more": (names, [float(each.against_gpus or 0) for each in known])}
    base = needed(found.base)
    chart = series_figure(
        "GPUs more than as given", bars, axis("") | {"tickangle": -30}, axis("GPUs"), unit="GPUs"
    )
    return Page(
        title=f"{scenario}: decisions",
        headline=f"{scenario} as given: {'no plan' if base is None else f'{base} GPUs'}",
        lines=tuple(decisions_lines(found)),
        parts=(ChartRow((chart,) if known else ()), titled_section(decisions_table(found))),
        footer="minicluster, sizing decisions",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
