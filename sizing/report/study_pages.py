"""The pages of `sizing pareto` and `sizing sweep`: their tables, and charts of the same figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.figure import axis
from minicluster.pages.page import ChartRow, Page
from sizing.planner.studies.result import figures
from sizing.report.plan_charts import front_figure
from sizing.report.series_chart import series_figure
from sizing.report.study import front_table, sweep_table
from sizing.report.tables import titled_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from minicluster.pages.figure import Figure
    from sizing.planner.design_points import DesignPoint
    from sizing.planner.studies.pareto import Front
    from sizing.planner.studies.result import Figures, StudyResult
    from sizing.planner.studies.sweep import Swept

MEASURES: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("GPUs", "GPUs", lambda found: found.gpus),
    ("TTFT at the SLO's percentile", "ms", lambda found: 1e3 * found.ttft_s),
    ("TPOT at the SLO's percentile", "ms", lambda found: 1e3 * found.tpot_s),
    ("Headroom", "times the load", lambda found: found.headroom_factor),
)
"""Title, unit and value of each chart of a sweep."""


def pareto_page(scenario: str, points: Sequence[DesignPoint], found: Sequence[Front]) -> Page:
    """Return the page of the configurations that no other beats."""
    kept = sum(any(front.kept[at] for front in found) for at in range(len(points)))
    return Page(
        title=f"{scenario}: configurations",
        headline=f"{kept} of {len(points):,} configurations of {scenario} are beaten by no other",
        lines=("Short simulations; `sizing plan` verifies the one that it takes with long ones.",),
        parts=(
            ChartRow(tuple(front_figure(front, points) for front in found)),
            *(titled_section(front_table(front, points)) for front in found),
        ),
        footer="minicluster, sizing pareto",
    )


def sweep_page(
    scenario: str,
    keys: Sequence[Swept],
    combinations: Sequence[tuple[str, ...]],
    answers: Sequence[StudyResult],
) -> Page:
    """Return the page of a scenario planned for many values of its keys."""
    planned = sum(answer.plan is not None for answer in answers)
    swept = " and ".join(key.key for key in keys)
    return Page(
        title=f"{scenario}: {swept}",
        headline=f"{planned} of {len(answers)} points of {scenario} have a plan",
        lines=(f"Planned anew for every value of {swept}.",),
        parts=(
            ChartRow(tuple(_sweep_figures(keys, combinations, answers))),
            titled_section(sweep_table(keys, combinations, answers)),
        ),
        footer="minicluster, sizing sweep",
    )


def _sweep_figures(
    keys: Sequence[Swept], combinations: Sequence[tuple[str, ...]], answers: Sequence[StudyResult]
) -> Iterator[Figure]:
    """Draw each measure over the first key, a line for each combination of the others."""
    series: dict[str, list[tuple[str, Figures]]] = {}
    for (first, *others), answer in zip(combinations, answers, strict=True):
        if answer.plan is not None:
            point = (first.partition("=")[2], figures(answer.plan))
            series.setdefault(" ".join(others) or "the plan", []).append(point)
    numeric = all(_is_number(value) for value in keys[0].values)
    x_axis = axis(keys[0].key) | ({} if numeric else {"type": "category"})
    for title, unit, value_of in MEASURES if series else ():
        drawn = {
            name: (
                [float(value) if numeric else value for value, _ in points],
                [value_of(found) for _, found in points],
            )
            for name, points in series.items()
        }
        y_axis = {**axis(unit), "rangemode": "tozero"}
        yield series_figure(title, drawn, x_axis, y_axis, unit=unit)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
