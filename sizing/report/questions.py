"""Answers of `sizing capacity`, `split-map`, `decisions` and `day` as sections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.pages.figure import BLUE, PALE, RED, Figure, axes, axis, contour, heat_map
from minicluster.pages.page import Cell, ChartRow, Section, Text
from minicluster.pages.shown import sections_of
from minicluster.units import counted, seconds
from sizing.planner.studies.capacity import Capacity, CapacityPoint
from sizing.planner.studies.day import Day
from sizing.planner.studies.decisions import Decision, Decisions, needed
from sizing.planner.studies.result import StudyResult, figures
from sizing.planner.studies.split_map import LINK, RATIO, UNSIZED, SplitMap, SplitPoint
from sizing.report.study import FROM_ZERO, series_figure
from sizing.report.tables import bold, columns_table, interval, latency, number, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from sizing.planner.studies.grid import Swept

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


@sections_of.register(Capacity)
def capacity_sections(found: Capacity) -> list[Section | ChartRow]:
    """Return what the most GPUs carry, its charts, one row per number of GPUs, and its basis."""
    carrying = [point for point in found.points if point.requests_per_s]
    headline = "No number of GPUs asked for holds the SLO"
    if carrying:
        best = carrying[-1]
        size = counted(best.gpus, "GPU")
        headline = f"{size} carry {best.requests_per_s:,.4g} requests/s within the SLO"
    gpus, x_axis = [float(point.gpus) for point in carrying], axis("GPUs") | FROM_ZERO
    charts = (
        series_figure(title, {title: (gpus, values)}, x_axis, axis(unit) | FROM_ZERO, unit=unit)
        for title, unit, values in (
            ("Highest rate", "requests/s", [point.requests_per_s for point in carrying]),
            ("Users", "users", [point.users for point in carrying]),
        )
        if carrying
    )
    notes = tuple(map(Text, _capacity_notes(found)))
    return [Section(headline, notes), ChartRow(tuple(charts)), _capacity_table(found)]


def _capacity_notes(found: Capacity) -> Iterator[str]:
    if found.interrupted:
        yield PARTIAL
    sure = "simulated with steps as calibrated"
    if found.confidence_fraction is not None:
        own = ", for each class by itself" if any(point.own for point in found.points) else ""
        sure = f"{found.confidence_fraction:.0%} confidence that the SLO holds at each rate{own}"
    yield f"{sure}; users think {found.think_s:.3g} s between an answer and the next request"
    costs = [point.running for point in found.points if point.running is not None]
    if costs and costs[0].usd_per_hour is None:
        yield NO_PRICE
    elif costs:
        yield (
            f"$: {costs[0].price_source}, per million output tokens; every GPU is paid for and"
            " draws full power all the time"
        )


def _capacity_table(found: Capacity) -> Section:
    at = found.percentile
    priced = any(point.running and point.running.usd_per_hour for point in found.points)
    heads = ["GPUs", "used", "requests/s", "users", "tokens/s", "J/token"]
    heads += ["$/Mtok"] if priced else []
    heads += [f"TTFT {at}", "80 % interval", f"TPOT {at}", "layout", "then binds"]
    rows = [
        [*_capacity_cells(name or str(point.gpus), row, at, priced=priced)]
        for point in found.points
        for name, row in {"": point, **point.own}.items()
    ]
    details = ("80 % interval", "J/token", "used", "tokens/s", "users")
    return table("Highest rate within the SLO", heads, rows,
                 words=("layout", "then binds"), details=details)  # fmt: skip


def _capacity_cells(
    name: str, point: CapacityPoint, at: str, *, priced: bool
) -> Iterator[str | Cell]:
    predicted, cost = point.prediction, point.running
    if cost is None:
        yield from (name, "")
        yield Cell("none", "bad")
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


# --- split map


@sections_of.register(SplitMap)
def split_map_sections(found: SplitMap) -> list[Section | ChartRow]:
    """
    Return the map: what splitting saves, or costs (negative), and the confidence of the sign.

    Lines say what its words mean, and why points have no pools.
    """
    pays = sum((point.saved_fraction or 0) > 0 for point in found.points)
    headline = f"Splitting pays at {pays} of {len(found.points)} points"
    rows = [(y, *map(_split_cell, row)) for y, row in _rows(found)]
    title = f"Saved by splitting, share of {found.objective}; ? where the sign is open"
    words = {str(cell) for _, *row in rows for cell in row}
    heads = (f"{_axis_name(found.y.key)}\n{_axis_name(found.x.key)} →", *_shown_values(found.x))
    shown = table(title, heads, rows)
    notes = tuple(map(Text, _split_notes(found, words)))
    return [Section(headline, notes), ChartRow((_map_figure(found),)), shown]


def _split_notes(found: SplitMap, words: set[str]) -> Iterator[str]:
    if found.interrupted:
        yield PARTIAL
    yield from _sharing(found.classes)
    if any("(" in word for word in words):
        yield "In brackets: chance that the sign is right, from the error model of the plans"
    if "aggregated" in words:
        yield "aggregated: split pools miss the SLO, or cost twice as much or more"
    if "split" in words:
        yield "split: aggregated pools miss the SLO"
    reasons = {point.reason for point in found.points} - {"", UNSIZED}
    yield from sorted(f"none: {reason}" for reason in reasons)


def _rows(found: SplitMap) -> list[tuple[str, Sequence[SplitPoint]]]:
    width = len(found.x.values)
    values = enumerate(_shown_values(found.y))
    return [(y, found.points[at * width : (at + 1) * width]) for at, y in values]


def _split_cell(point: SplitPoint) -> str | Cell:
    """Write one cell: `+25% (97%)`."""
    saved, sure = point.saved_fraction, point.confidence_fraction
    if point.reason == UNSIZED:
        return ""
    if saved is None or sure is None:
        if point.mixed_gpus is not None:
            return Cell("aggregated", "bad")
        return Cell("split", "good") if point.split_gpus is not None else "none"
    if not saved:
        return "equal"
    if sure < SURE:
        return f"{saved:+.0%}? ({sure:.0%})"
    return Cell(f"{saved:+.0%} ({sure:.0%})", "good" if saved > 0 else "bad")


def _sharing(classes: int) -> Iterable[str]:
    """Say of classes of requests that pools of their own were not looked at."""
    if classes:
        yield f"the {classes} classes of requests share pools here; own pools were not looked at"


def _map_figure(found: SplitMap) -> Figure:
    rows = _rows(found)
    percent = [[_drawn_percent(point) for point in row] for _, row in rows]
    texts = [[f"{_split_cell(point)}: {_gpus(point)}" for point in row] for _, row in rows]
    name = "saved by splitting, %"
    hover = f"%{{z:.0f}} % of {found.objective}; %{{text}}"
    return Figure(
        title="Saved by splitting",
        caption=f"Saved by splitting, % of {found.objective}, over {_axis_name(found.x.key)}"
        f" and {_axis_name(found.y.key)}; beyond the line split pools cost no more than aggregated"
        " ones",
        traces=(
            heat_map(name, percent, texts, hover=hover, colours=(RED, PALE, BLUE)),
            contour("break-even", percent, at=BREAK_EVEN),
        ),
        layout=axes(_ticks(found.x), _ticks(found.y)),
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


def _ticks(swept: Swept) -> dict[str, Any]:
    values = _shown_values(swept)
    return axis(_axis_name(swept.key)) | {"tickvals": list(range(len(values))), "ticktext": values}


AXES = {RATIO: ("prompt tokens per answer token", 1.0), LINK: ("link, GB/s", 1e9)}
"""Name and unit of the axes of a map that are no scenario keys."""


def _axis_name(key: str) -> str:
    return AXES[key][0] if key in AXES else key


def _shown_values(swept: Swept) -> list[str]:
    if swept.key not in AXES:
        return list(swept.values)
    return [f"{float(value) / AXES[swept.key][1]:.3g}" for value in swept.values]


# --- decisions


@sections_of.register(Decisions)
def decisions_sections(found: Decisions) -> list[Section | ChartRow]:
    """Return the plan as given, a bar per change, and a row each, the fewest GPUs first."""
    base = needed(found.base)
    notes = [PARTIAL] if found.interrupted else []
    notes.append("Planned anew with one thing changed at a time.")
    headline = f"As given: {'no plan' if base is None else counted(base, 'GPU')}"
    same = [row for row in found.rows if row.against_gpus == 0]
    rows: list[tuple[int | None, int, tuple[str | Cell, ...]]] = [
        (row.gpus, 1, (row.name, row.value, *_needed(row.result, row.against_gpus)))
        for row in found.rows
        if row not in same
    ]
    given = ("as given", "", *_needed(found.base, None))
    rows.append((base, 0, bold(*given)))
    rows.sort(key=lambda row: (row[0] is None, row[0] or 0, row[1]))
    heads = ("decision", "changed to", "GPUs", "against", "TTFT", "TPOT", "what binds")
    return [
        Section(headline, tuple(map(Text, notes))),
        ChartRow(tuple(_decision_figures(found))),
        table("What changes the GPUs", heads, [cells for _, _, cells in rows],
              words=("decision", "changed to", "what binds"), details=("TTFT", "TPOT"),
              notes=_unchanged(same)),
    ]  # fmt: skip


def _unchanged(rows: Sequence[Decision]) -> Iterator[str]:
    """Yield what was changed and needs as many GPUs as the plan as given."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.name, []).append(row.value.rpartition("=")[2])
    if names:
        changes = "; ".join(f"{name} {', '.join(values)}" for name, values in names.items())
        yield f"{len(rows)} others: no change ({changes})"


def _decision_figures(found: Decisions) -> Iterator[Figure]:
    changed = [row for row in found.rows if row.against_gpus]
    if changed:
        names = [f"{row.name}: {row.value.rpartition('=')[2]}" for row in changed]
        bars = {"GPUs more": (names, [float(row.against_gpus or 0) for row in changed])}
        x_axis = axis("") | {"tickangle": -30}
        yield series_figure("GPUs more than as given", bars, x_axis, axis("GPUs"), unit="GPUs")


def _needed(answer: StudyResult, against: int | None) -> tuple[str, ...]:
    """Return GPUs needed, the change, latencies and the first limit."""
    gpus = needed(answer)
    first = ("none" if gpus is None else str(gpus), "" if against is None else f"{against:+d}")
    if not answer.plans:
        return (*first, "", "", answer.reason)
    found = figures(answer.plans)
    return (*first, latency(found.ttft_s), latency(found.tpot_s), found.binds)


# --- day


HOURS = 24


@sections_of.register(Day)
def day_sections(found: Day) -> list[Section | ChartRow]:
    """Return the answer, what it rests on, charts, the static shares, the best one's day."""
    return [
        Section(_day_headline(found), tuple(map(Text, _day_notes(found)))),
        ChartRow(tuple(_day_figures(found))),
        _shares_table(found),
        _hours_table(found),
    ]


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


def _day_notes(found: Day) -> Iterator[str]:
    """Yield why the best static share is the best, and what the figures rest on."""
    best, options = found.best, found.options
    reason = f"best static share: {best.static_fraction:.0%}, {best.static_gpus} GPUs"
    smaller = found.runs[: found.runs.index(best)]
    missing = [run for run in smaller if run.attained_fraction < options.attainment]
    if missing:
        yield (
            f"{reason}; with {missing[-1].static_gpus} only"
            f" {missing[-1].attained_fraction:.2%} of requests find the SLO held,"
            f" {options.attainment:.2%} are asked for"
        )
    else:
        yield f"{reason}: one replica of each pool is enough, more take more GPU-hours"
    yield f"plan for the peak: {found.layout}"
    yield from _sharing(found.classes)
    yield (
        f"cold start {options.cold_start_s:g} s, forecast error up to"
        f" {options.forecast_error_fraction:.0%}; the policy decides every {options.interval_s:g}"
        f" s, with a margin of {options.margin:.0%}, and holds replicas for {options.hold_s:g} s"
    )


def _shares_table(found: Day) -> Section:
    best, runs = found.best, found.runs
    columns = {
        "static share": [f"{run.static_fraction:.0%}" for run in runs],
        "static GPUs": [str(run.static_gpus) for run in runs],
        "GPU-hours": [f"{run.gpu_hours:,.1f}" for run in runs],
        "fewer": [f"{1 - run.gpu_hours / found.static_gpu_hours:.0%}" for run in runs],
        "SLO held": [f"{run.attained_fraction:.2%}" for run in runs],
        "": ["best" if run is best else "" for run in runs],
    }
    return columns_table("Static share, autoscaled above it; SLO held: of requests", columns)


def _hours_table(found: Day) -> Section:
    best = found.best
    columns = {
        "hour": [str(hour) for hour in range(HOURS)],
        "requests/s": [f"{rate:,.4g}" for rate in _hourly(found.requests_per_s)],
        "static GPUs": [str(found.static_gpus)] * HOURS,
        "GPUs": [f"{gpus:,.1f}" for gpus in _hourly(best.gpus)],
        **{
            f"{role} answer": [f"{count:,.1f}" for count in _hourly(counts)]
            for role, counts in best.replicas.items()
        },
        "SLO held": [f"{share:.1%}" for share in _attained(found)],
    }
    title = f"The day at a static share of {best.static_fraction:.0%}"
    return columns_table(title, columns, details=("static GPUs",))


def _day_figures(found: Day) -> Iterator[Figure]:
    """Draw rates, GPUs and attainment by the hour."""
    hours = [float(hour) for hour in range(HOURS)]
    gpus = {
        "static": (hours, [float(found.static_gpus)] * HOURS),
        "autoscaled": (hours, _hourly(found.best.gpus).tolist()),
    }
    for title, unit, series in (
        ("Rate", "requests/s", {"rate": (hours, _hourly(found.requests_per_s).tolist())}),
        ("GPUs", "GPUs", gpus),
        ("SLO held", "% of requests", {"held": (hours, (100 * _attained(found)).tolist())}),
    ):
        yield series_figure(title, series, axis("hour"), axis(unit) | FROM_ZERO, unit=unit)


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
    sent = np.maximum(_hourly(rates), 1e-12)
    return np.asarray(_hourly(rates * np.asarray(found.best.holds)) / sent)
