"""Comparisons, sweeps, losses and Pareto fronts as tables; pages of studies and their charts."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from minicluster.pages.figure import SERIES_COLOURS, Figure, axes, axis, bars, marks
from minicluster.pages.page import ChartRow, Page
from minicluster.units import seconds
from sizing.planner.studies.result import Figures, StudyResult, figures
from sizing.report.plan_charts import front_figure
from sizing.report.tables import columns_table, table, titled_section, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from minicluster.plan import Confidence
    from sizing.planner.studies.loss import Loss
    from sizing.planner.studies.pareto import DesignPoint, Front
    from sizing.planner.studies.sweep import Swept

LEFT = ("scenario", "layout", "then binds", "lost", "missed")
MOST_ROWS = 20
"""Maximum rows per front in a terminal; `--json` has all."""


def comparison_table(answers: Sequence[StudyResult], statistic: str) -> Table:
    """Return one row per scenario: its size, cost, latencies, headroom and confidence."""
    found_all = [figures(each.plans) for each in answers if each.plans]
    priced = any(each.running.usd_per_hour is not None for each in found_all)
    heads = ["scenario", "GPUs", "nodes", "layout", "W", "J/token"]
    heads += ["$/h", "$/Mtok"] if priced else []
    heads += [f"TTFT {statistic}", f"TPOT {statistic}", "headroom", "then binds", "confidence"]
    made = table("Compared", heads, (), left=LEFT)
    for answer in answers:
        if not answer.plans:
            made.add_row(answer.label, "", "", Text("infeasible", style="red"))
            continue
        found = figures(answer.plans)
        cost = found.running
        costs = [number(cost.power_w, ",.0f"), number(cost.joules_per_output_token, ".2f")]
        if priced:
            costs += [number(cost.usd_per_hour), number(cost.usd_per_million_output_tokens)]
        confidence = number(found.confidence_fraction, ".0%")
        made.add_row(answer.label, *_size(found), *costs, *_limits(found), confidence)
    return made


def _size(found: Figures) -> tuple[str, str, str]:
    return str(found.gpus), str(found.nodes), found.layout


def _limits(found: Figures) -> tuple[str, str, str, str]:
    headroom = f"{found.headroom_factor:.2f}"
    return latency(found.ttft_s), latency(found.tpot_s), headroom, found.binds


def latency(value_s: float | None) -> str:
    """Write a latency; nothing where each class of requests has its own."""
    return "" if value_s is None else seconds(value_s)


def number(value: float | None, form: str = ",.2f") -> str:
    """Write a number; a hyphen where it is unknown."""
    return "-" if value is None else format(value, form)


def comparison_lines(answers: Sequence[StudyResult]) -> Iterable[str]:
    """Yield why there is no plan, what engines were measured, sources of power and price."""
    for answer in answers:
        if not answer.plans:
            yield f"{answer.label}: {answer.reason}"
    plans = {each.label: next(iter(each.plans.values())) for each in answers if each.plans}
    if len({plan.engine.name for plan in plans.values()}) > 1:
        for label, plan in plans.items():
            yield f"{label}: {plan.validated_on.note}"
    known = [figures(answer.plans).running for answer in answers if answer.plans]
    for name, sources in (
        ("W and J/token", {each.power_source for each in known}),
        ("$", {each.price_source for each in known}),
    ):
        known_sources = sorted(each for each in sources if each is not None)
        if known_sources:
            yield f"{name}: {', '.join(known_sources)}"


def sweep_table(
    keys: Sequence[Swept], combinations: Sequence[tuple[str, ...]], answers: Sequence[StudyResult]
) -> Table:
    """Return one row per point; infeasible ones with their reason."""
    names = [key.key for key in keys]
    heads = (*names, "GPUs", "nodes", "layout", "TTFT", "TPOT", "headroom", "then binds")
    title = "Swept; latencies at the percentile of the SLO"
    made = table(title, heads, (), left=(*LEFT, *names))
    for combination, answer in zip(combinations, answers, strict=True):
        values = [each.partition("=")[2] for each in combination]
        if not answer.plans:
            made.add_row(*values, *[""] * 6, Text(answer.reason, style="red"))
        else:
            found = figures(answer.plans)
            made.add_row(*values, *_size(found), *_limits(found))
    return made


def losses_table(found: Sequence[Loss], statistic: str) -> Table:
    """Return one row per pool that loses a replica."""
    left = [", ".join(f"{count} {role}" for role, count in each.replicas.items()) for each in found]
    columns: dict[str, list[Any]] = {
        "lost": [each.lost or "nothing" for each in found],
        "replicas left": left,
        f"TTFT {statistic}": ["" if x.ttft_s is None else seconds(x.ttft_s) for x in found],
        f"TPOT {statistic}": ["" if x.tpot_s is None else seconds(x.tpot_s) for x in found],
        "SLO": [verdict(holds=each.holds) for each in found],
        "missed": ["; ".join(each.misses) for each in found],
    }
    return columns_table("One replica lost, simulated", columns, left=LEFT)


def losses_note(found: Confidence) -> str:
    """Return how much slower than predicted the simulated steps are."""
    return (
        f"At {found.fraction:.0%} confidence: prefill steps {found.prefill_factor:.2f}, decode"
        f" steps {found.decode_factor:.2f} times as long as predicted"
    )


def front_table(front: Front, points: Sequence[DesignPoint]) -> Table:
    """Return the Pareto-optimal configurations of a front in the order of its first axis."""
    kept = sorted((at for at in range(len(points)) if front.kept[at]), key=lambda at: front.xs[at])
    rows = (
        (
            f"{points[at].label} batch {points[at].configuration.batch_limit}",
            f"{front.xs[at]:,.4g}",
            f"{front.ys[at]:,.4g}",
            verdict(holds=points[at].meets_slo),
        )
        for at in kept[:MOST_ROWS]
    )
    more = len(kept) - MOST_ROWS
    return table(
        f"{front.name[0].upper()}{front.name[1:]}",
        ("layout", front.x_name, front.y_name, "SLO"),
        rows,
        caption=f"{more} more: --json" if more > 0 else None,
    )


MEASURES: tuple[tuple[str, str, Callable[[Figures], float | None], float], ...] = (
    ("GPUs", "GPUs", lambda found: found.gpus, 1),
    ("TTFT at the SLO's percentile", "ms", lambda found: found.ttft_s, 1e3),
    ("TPOT at the SLO's percentile", "ms", lambda found: found.tpot_s, 1e3),
    ("Headroom", "times the load", lambda found: found.headroom_factor, 1),
)
"""Title, unit, value and its factor of each chart of a sweep."""

FROM_ZERO = {"rangemode": "tozero"}
"""Layout of an axis that begins at 0."""


def charts_page(title: str, headline: str, *parts: Figure | Table | str, command: str) -> Page:
    """Return the page of a study: its answer, what that rests on, its charts, its tables."""
    figures = tuple(part for part in parts if isinstance(part, Figure))
    tables = (titled_section(part) for part in parts if isinstance(part, Table))
    return Page(
        title=title,
        headline=headline,
        lines=tuple(part for part in parts if isinstance(part, str)),
        parts=(ChartRow(figures), *tables),
        footer=f"minicluster, sizing {command}",
    )


def pareto_page(scenario: str, points: Sequence[DesignPoint], found: Sequence[Front]) -> Page:
    """Return the page of the configurations that no other beats."""
    kept = sum(any(front.kept[at] for front in found) for at in range(len(points)))
    return charts_page(
        f"{scenario}: configurations",
        f"{kept} of {len(points):,} configurations of {scenario} are beaten by no other",
        "Short simulations; `sizing plan` verifies the one that it takes with long ones.",
        *(front_figure(front, points) for front in found),
        *(front_table(front, points) for front in found),
        command="pareto",
    )


def sweep_page(
    scenario: str,
    keys: Sequence[Swept],
    combinations: Sequence[tuple[str, ...]],
    answers: Sequence[StudyResult],
) -> Page:
    """Return the page of a scenario planned for many values of its keys."""
    planned = sum(bool(answer.plans) for answer in answers)
    swept = " and ".join(key.key for key in keys)
    return charts_page(
        f"{scenario}: {swept}",
        f"{planned} of {len(answers)} points of {scenario} have a plan",
        f"Planned anew for every value of {swept}.",
        *_sweep_figures(keys, combinations, answers),
        sweep_table(keys, combinations, answers),
        command="sweep",
    )


def _sweep_figures(
    keys: Sequence[Swept], combinations: Sequence[tuple[str, ...]], answers: Sequence[StudyResult]
) -> Iterator[Figure]:
    """Draw each measure over the first key, a line for each combination of the others."""
    series: dict[str, list[tuple[str, Figures]]] = {}
    for (first, *others), answer in zip(combinations, answers, strict=True):
        if answer.plans:
            point = (first.partition("=")[2], figures(answer.plans))
            series.setdefault(" ".join(others) or "the plan", []).append(point)
    numeric = all(_is_number(value) for value in keys[0].values)
    x_axis = axis(keys[0].key) | ({} if numeric else {"type": "category"})
    for title, unit, value_of, factor in MEASURES if series else ():
        drawn: dict[str, tuple[list[float | str], list[float]]] = {}
        for name, points in series.items():
            drawn[name] = [], []
            for at, found in points:
                value = value_of(found)
                if value is not None:
                    drawn[name][0].append(float(at) if numeric else at)
                    drawn[name][1].append(factor * value)
        yield series_figure(title, drawn, x_axis, axis(unit) | FROM_ZERO, unit=unit)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def series_figure(
    title: str,
    series: Mapping[str, tuple[Sequence[float | str], Sequence[float]]],
    x_axis: dict[str, Any],
    y_axis: dict[str, Any],
    *,
    unit: str,
) -> Figure:
    """
    Draw series over a shared axis: a line through marks over numbers, bars over names.

    Args:
        series: by name, the places on the axis and the values there.
        unit: of the values.
    """
    traces, said = [], []
    for (name, (xs, ys)), colour in zip(series.items(), cycle(SERIES_COLOURS), strict=False):
        hover = f"%{{y:,.4g}} {unit} at %{{x}}"
        labels = [x for x in xs if isinstance(x, str)]
        traces.append(
            bars(name, labels, ys, colour=colour, hover=hover)
            if labels
            else marks(name, xs, ys, colour=colour, hover=hover, lines=True)
        )
        drawn = ", ".join(
            f"{y:,.4g} at {x if isinstance(x, str) else format(x, ',g')}"
            for x, y in zip(xs, ys, strict=True)
        )
        said.append(f"{name}: {drawn}" if len(series) > 1 else drawn)
    caption = f"{unit if title == unit else f'{title}, {unit}'}: {'; '.join(said)}"
    return Figure(title=title, caption=caption, traces=tuple(traces), layout=axes(x_axis, y_axis))
