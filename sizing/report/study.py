"""Comparisons, sweeps, losses and Pareto fronts as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from minicluster.units import seconds
from sizing.planner.studies.result import figures
from sizing.report.tables import columns_table, table, verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from minicluster.plan import Confidence
    from sizing.planner.design_points import DesignPoint
    from sizing.planner.studies.loss import Loss
    from sizing.planner.studies.pareto import Front
    from sizing.planner.studies.result import Figures, StudyResult
    from sizing.planner.studies.sweep import Swept

LEFT = ("scenario", "layout", "then binds", "lost", "missed")
MOST_ROWS = 20
"""Maximum rows per front in a terminal; `--json` has all."""


def comparison_table(answers: Sequence[StudyResult], statistic: str) -> Table:
    """Return one row per scenario: its size, cost, latencies, headroom and confidence."""
    priced = any(a.plan and a.plan.cost.price_usd_per_hour is not None for a in answers)
    heads = ["scenario", "GPUs", "nodes", "layout", "W", "J/token"]
    heads += ["$/h", "$/Mtok"] if priced else []
    heads += [f"TTFT {statistic}", f"TPOT {statistic}", "headroom", "then binds", "confidence"]
    made = table("Compared", heads, (), left=LEFT)
    for answer in answers:
        if answer.plan is None:
            made.add_row(answer.label, "", "", Text("infeasible", style="red"))
            continue
        found = figures(answer.plan)
        cost = found.running
        costs = [_number(cost.power_w, ",.0f"), _number(cost.joules_per_output_token, ".2f")]
        if priced:
            costs.append(_number(cost.usd_per_hour, ",.2f"))
            costs.append(_number(cost.usd_per_million_output_tokens, ",.2f"))
        confidence = _number(found.confidence_fraction, ".0%")
        made.add_row(answer.label, *_size(found), *costs, *_limits(found), confidence)
    return made


def _size(found: Figures) -> tuple[str, str, str]:
    return str(found.gpus), str(found.nodes), found.layout


def _limits(found: Figures) -> tuple[str, str, str, str]:
    latencies = seconds(found.ttft_s), seconds(found.tpot_s)
    return *latencies, f"{found.headroom_factor:.2f}", found.binds


def comparison_lines(answers: Sequence[StudyResult]) -> Iterable[str]:
    """Yield why there is no plan, and the sources of power and price."""
    for answer in answers:
        if answer.plan is None:
            yield f"{answer.label}: {answer.reason}"
    known = [figures(answer.plan).running for answer in answers if answer.plan]
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
        if answer.plan is None:
            made.add_row(*values, *[""] * 6, Text(answer.reason, style="red"))
        else:
            found = figures(answer.plan)
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
            f"{points[at].label} batch {points[at].candidate.tandem.decode.max_batch_size}",
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


def _number(value: float | None, form: str) -> str:
    """Write a number; a hyphen where it is unknown."""
    return "-" if value is None else format(value, form)
