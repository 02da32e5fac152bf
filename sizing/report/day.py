"""Answer, table and page of `sizing day`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.pages.figure import axis
from minicluster.pages.page import ChartRow, Page
from sizing.report.series_chart import series_figure
from sizing.report.tables import columns_table, titled_section

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray
    from rich.table import Table

    from sizing.planner.studies.day import Day, DayRun

HOURS = 24


def day_headline(found: Day) -> str:
    """Return the answer in one sentence."""
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


def day_lines(found: Day) -> Iterable[str]:
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
    yield (
        f"cold start {asked.cold_start_s:g} s, forecast error up to"
        f" {asked.forecast_error_fraction:.0%}; the policy decides every {asked.interval_s:g} s,"
        f" with a margin of {asked.margin:.0%}, and holds replicas for {asked.hold_s:g} s"
    )


def shares_table(found: Day) -> Table:
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


def hours_table(found: Day) -> Table:
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
        "SLO held": [f"{each:.1%}" for each in _attained(found, best)],
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
        ("Rate", "requests/s", {"rate": (hours, _hourly(found.requests_per_s).tolist())}),
        ("GPUs", "GPUs", gpus),
        ("SLO held", "% of requests", {"held": (hours, (100 * _attained(found)).tolist())}),
    )
    figures = tuple(
        series_figure(title, series, axis("hour"), axis(unit) | {"rangemode": "tozero"}, unit=unit)
        for title, unit, series in charts
    )
    return Page(
        title=f"{scenario}: a day",
        headline=day_headline(found),
        lines=tuple(day_lines(found)),
        parts=(
            ChartRow(figures),
            titled_section(shares_table(found)),
            titled_section(hours_table(found)),
        ),
        footer="minicluster, sizing day",
    )


def _hourly(values: ArrayLike) -> NDArray[np.float64]:
    """Return the mean of each hour; intervals longer than one stand for all their hours."""
    array = np.asarray(values, dtype=np.float64)
    hours = np.arange(len(array)) * HOURS / len(array)
    if len(array) < HOURS:
        return np.asarray(array[np.arange(HOURS) * len(array) // HOURS])
    sums = np.bincount(hours.astype(int), array, HOURS)
    return np.asarray(sums / np.bincount(hours.astype(int), minlength=HOURS))


def _attained(found: Day, run: DayRun | None = None) -> NDArray[np.float64]:
    """Return the share of each hour's requests that find the SLO held."""
    rates = np.asarray(found.requests_per_s)
    asked = np.maximum(_hourly(rates), 1e-12)
    return np.asarray(_hourly(rates * np.asarray((run or found.best).holds)) / asked)
