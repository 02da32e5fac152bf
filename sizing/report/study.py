"""Comparisons, sweeps, losses and Pareto fronts as sections."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

from minicluster.pages.figure import SERIES_COLOURS, Figure, axes, axis, bars, marks
from minicluster.pages.page import Cell, ChartRow, Section, Text
from sizing.planner.studies.result import Figures, StudyResult, figures
from sizing.report.plan_charts import front_figure
from sizing.report.tables import columns_table, latency, number, table, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from minicluster.plan import Confidence
    from sizing.planner.studies.grid import GridCase, Swept
    from sizing.planner.studies.loss import Loss
    from sizing.planner.studies.pareto import DesignPoint, Front

WORDS = ("layout", "then binds")
MOST_ROWS = 20
"""Maximum rows per front; `--json` has all."""


# --- compare


def comparison_sections(
    answers: Sequence[StudyResult], statistic: str, headline: str
) -> Iterator[Section]:
    """Yield the *headline*, and one row per scenario: size, cost, latencies, headroom."""
    yield Section(headline, ())
    labels = [(answer.label,) for answer in answers]
    title, notes = "Compared", _comparison_notes(answers)
    yield _grid_table(title, ("scenario",), labels, answers, statistic, notes=notes)


def _grid_table(
    title: str,
    names: Sequence[str],
    labels: Sequence[Sequence[str]],
    answers: Sequence[StudyResult],
    statistic: str,
    *,
    notes: Iterable[str] = (),
) -> Section:
    """Return one row per scenario of a grid: size, cost, latencies and headroom of its plan."""
    costs = [figures(answer.plans).running for answer in answers if answer.plans]
    priced = any(cost.usd_per_hour is not None for cost in costs)
    heads = [*names, "GPUs", "nodes", "layout", "W", "J/token"]
    heads += ["$/h", "$/Mtok"] if priced else []
    heads += [f"TTFT {statistic}".strip(), f"TPOT {statistic}".strip()]
    heads += ["headroom", "then binds", "confidence"]
    rows: list[list[str | Cell]] = []
    for label, answer in zip(labels, answers, strict=True):
        if not answer.plans:
            rows.append([*label, "", "", Cell("infeasible", "bad")])
            continue
        size = figures(answer.plans)
        cost = size.running
        cells = [number(cost.power_w, ",.0f"), number(cost.joules_per_output_token, ".2f")]
        if priced:
            cells += [number(cost.usd_per_hour), number(cost.usd_per_million_output_tokens)]
        confidence = number(size.confidence_fraction, ".0%")
        rows.append([*label, *_size(size), *cells, *_limits(size), confidence])
    details = ("nodes", "J/token", "W", "confidence")
    return table(title, heads, rows, words=(*WORDS, *names), details=details, notes=notes)


def _size(found: Figures) -> tuple[str, str, str]:
    return str(found.gpus), str(found.nodes), found.layout


def _limits(found: Figures) -> tuple[str, str, str, str]:
    headroom = f"{found.headroom_factor:.2f}"
    return latency(found.ttft_s), latency(found.tpot_s), headroom, found.binds


def _comparison_notes(answers: Sequence[StudyResult]) -> Iterable[str]:
    """Yield why there is no plan, what engines were measured, the sources of power and price."""
    for answer in answers:
        if not answer.plans:
            yield f"{answer.label}: {answer.reason}"
    plans = {answer.label: next(iter(answer.plans.values())) for answer in answers if answer.plans}
    if len({plan.engine.name for plan in plans.values()}) > 1:
        for label, plan in plans.items():
            yield f"{label}: {plan.validated_on.note}"
    costs = [figures(answer.plans).running for answer in answers if answer.plans]
    for name, sources in (
        ("W and J/token", {cost.power_source for cost in costs}),
        ("$", {cost.price_source for cost in costs}),
    ):
        if named := sorted(source for source in sources if source is not None):
            yield f"{name}: {', '.join(named)}"


# --- sweep

MEASURES: tuple[tuple[str, str, Callable[[Figures], float | None], float], ...] = (
    ("GPUs", "GPUs", lambda found: found.gpus, 1),
    ("TTFT at the SLO's percentile", "ms", lambda found: found.ttft_s, 1e3),
    ("TPOT at the SLO's percentile", "ms", lambda found: found.tpot_s, 1e3),
    ("Headroom", "times the load", lambda found: found.headroom_factor, 1),
)
"""Title, unit, value and its factor of each chart of a sweep."""

FROM_ZERO = {"rangemode": "tozero"}
"""Layout of an axis that begins at 0."""


def sweep_sections(
    keys: Sequence[Swept], cases: Sequence[GridCase], answers: Sequence[StudyResult]
) -> Iterator[Section | ChartRow]:
    """Yield how many points have a plan, charts, and one row per point or why it has none."""
    planned = sum(bool(answer.plans) for answer in answers)
    names = [swept.key for swept in keys]
    anew = f"Planned anew for every value of {' and '.join(names)}."
    yield Section(f"{planned} of {len(answers)} points have a plan", (Text(anew),))
    yield ChartRow(tuple(_sweep_figures(keys, cases, answers)))
    title, values = "Swept; latencies at the percentile of the SLO", [case.values for case in cases]
    yield _grid_table(title, names, values, answers, "", notes=_comparison_notes(answers))


def _sweep_figures(
    keys: Sequence[Swept], cases: Sequence[GridCase], answers: Sequence[StudyResult]
) -> Iterator[Figure]:
    """Draw each measure over the first key, a line for each combination of the others."""
    series: dict[str, list[tuple[str, Figures]]] = {}
    others = [swept.key for swept in keys[1:]]
    for case, answer in zip(cases, answers, strict=True):
        if answer.plans:
            place, *rest = case.values
            line = " ".join(f"{key}={other}" for key, other in zip(others, rest, strict=True))
            series.setdefault(line or "the plan", []).append((place, figures(answer.plans)))
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


# --- losses


def losses_section(
    losses: Sequence[Loss], statistic: str, confidence: Confidence | None
) -> Section:
    """Return one row per pool that loses a replica, and how slow the simulated steps are."""
    remaining = [
        ", ".join(f"{count} {role}" for role, count in loss.replicas.items()) for loss in losses
    ]
    columns: dict[str, list[Any]] = {
        "lost": [loss.lost or "nothing" for loss in losses],
        "replicas left": remaining,
        f"TTFT {statistic}": [latency(loss.ttft_s) for loss in losses],
        f"TPOT {statistic}": [latency(loss.tpot_s) for loss in losses],
        "SLO": [verdict(holds=loss.holds) for loss in losses],
        "missed": ["; ".join(loss.misses) for loss in losses],
    }
    notes = []
    if confidence is not None:
        notes.append(
            f"At {confidence.fraction:.0%} confidence: prefill steps"
            f" {confidence.prefill_factor:.2f}, decode steps {confidence.decode_factor:.2f} times"
            " as long as predicted"
        )
    words = ("replicas left", "missed")
    return columns_table("One replica lost, simulated", columns, words=words, notes=notes)


# --- pareto


def pareto_sections(
    points: Sequence[DesignPoint], drawn: Sequence[Front]
) -> Iterator[Section | ChartRow]:
    """Yield how many configurations no other beats, and each front as a chart and a table."""
    kept = sum(any(front.kept[at] for front in drawn) for at in range(len(points)))
    beaten = f"{kept} of {len(points):,} configurations are beaten by no other"
    short = "Short simulations; `sizing plan` verifies the one that it takes with long ones."
    yield Section(beaten, (Text(short),))
    yield ChartRow(tuple(front_figure(front, points) for front in drawn))
    yield from (front_table(front, points) for front in drawn)


def front_table(front: Front, points: Sequence[DesignPoint]) -> Section:
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
    title = f"{front.name[0].upper()}{front.name[1:]}"
    heads = ("layout", front.x_name, front.y_name, "SLO")
    return table(title, heads, rows, notes=[f"{more} more: --json"] if more > 0 else ())


# --- charts


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
        series: by name, the places on the axis and the values there, in *unit*.
    """
    traces, captions = [], []
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
        captions.append(f"{name}: {drawn}" if len(series) > 1 else drawn)
    caption = f"{unit if title == unit else f'{title}, {unit}'}: {'; '.join(captions)}"
    return Figure(title=title, caption=caption, traces=tuple(traces), layout=axes(x_axis, y_axis))
