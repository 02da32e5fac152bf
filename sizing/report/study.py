"""Comparisons, sweeps, sensitivity, losses and Pareto fronts as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from minicluster.units import seconds
from sizing.planner.studies.result import figures

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from minicluster.plan import Confidence
    from sizing.planner.design_points import DesignPoint
    from sizing.planner.studies.loss import Loss
    from sizing.planner.studies.pareto import Front
    from sizing.planner.studies.result import StudyResult
    from sizing.planner.studies.sensitivity import Changed
    from sizing.planner.studies.sweep import Swept

LEFT = ("scenario", "layout", "then binds", "bound by", "number", "what binds", "lost", "missed")
MOST_ROWS = 20
"""Maximum rows per front in a terminal; `--json` has all."""


def comparison_table(answers: Sequence[StudyResult], statistic: str) -> Table:
    """Return one row per scenario: its size, cost, latencies, headroom and confidence."""
    priced = any(a.plan and a.plan.cost.price_usd_per_hour is not None for a in answers)
    heads = ["scenario", "GPUs", "nodes", "layout", "W", "J/token"]
    heads += ["$/h", "$/Mtok"] if priced else []
    heads += [f"TTFT {statistic}", f"TPOT {statistic}", "headroom", "then binds", "confidence"]
    table = _table("Compared", heads)
    for answer in answers:
        if answer.plan is None:
            none = Text("infeasible", style="red")
            table.add_row(answer.label, "", "", none, *[""] * (len(heads) - 4))
            continue
        found = figures(answer.plan)
        cost = found.running
        row = [answer.label, str(found.gpus), str(found.nodes), found.layout]
        row += [_number(cost.power_w, ",.0f"), _number(cost.joules_per_output_token, ".2f")]
        if priced:
            row += [_number(cost.usd_per_hour, ",.2f")]
            row += [_number(cost.usd_per_million_output_tokens, ",.2f")]
        row += [seconds(found.ttft_s), seconds(found.tpot_s), f"{found.headroom_factor:.2f}"]
        row += [found.binds, _number(found.confidence_fraction, ".0%")]
        table.add_row(*row)
    return table


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
    heads = ["GPUs", "nodes", "layout", "TTFT", "TPOT", "headroom", "then binds"]
    table = _table(
        "Swept; latencies at the percentile of the SLO", [*(k.key for k in keys), *heads]
    )
    for combination, answer in zip(combinations, answers, strict=True):
        values = [each.partition("=")[2] for each in combination]
        if answer.plan is None:
            why = Text(answer.reason, style="red")
            table.add_row(*values, *[""] * 6, why)
            continue
        found = figures(answer.plan)
        table.add_row(
            *values,
            str(found.gpus),
            str(found.nodes),
            found.layout,
            seconds(found.ttft_s),
            seconds(found.tpot_s),
            f"{found.headroom_factor:.2f}",
            found.binds,
        )
    return table


def sensitivity_table(base: StudyResult, found: Sequence[Changed]) -> Table:
    """Return one row per change: GPUs needed, latencies, the first limit."""
    heads = ["number", "change", "is then", "GPUs", "against", "TTFT", "TPOT", "what binds"]
    table = _table("Sensitivity: planned anew with one number changed", heads)
    before = figures(base.plan).gpus if base.plan else None
    for at, each in enumerate(found):
        last = at + 1 == len(found) or found[at + 1].name != each.name
        gpus, against, rest = _needed(each.answer, before)
        value = f"{each.value:.3g}" if each.value < 1 or each.value >= 1e6 else f"{each.value:,.4g}"  # noqa: PLR2004
        table.add_row(
            each.name, f"{each.change_fraction:+.0%}", value, gpus, against, *rest, end_section=last
        )
    return table


def losses_table(found: Iterable[Loss], statistic: str) -> Table:
    """Return one row per pool that loses a replica."""
    heads = ["lost", "replicas left", f"TTFT {statistic}", f"TPOT {statistic}", "SLO", "missed"]
    table = _table("One replica lost, simulated", heads)
    for each in found:
        left = ", ".join(f"{count} {role}" for role, count in each.replicas.items())
        word = ("holds", "green") if each.holds else ("missed", "red")
        table.add_row(
            each.lost or "nothing",
            left,
            "" if each.ttft_s is None else seconds(each.ttft_s),
            "" if each.tpot_s is None else seconds(each.tpot_s),
            Text(word[0], style=word[1]),
            "; ".join(each.misses),
        )
    return table


def losses_note(found: Confidence) -> str:
    """Return how much slower than predicted the simulated steps are."""
    return (
        f"At {found.fraction:.0%} confidence: prefill steps {found.prefill_factor:.2f}, decode"
        f" steps {found.decode_factor:.2f} times as long as predicted"
    )


def front_table(front: Front, points: Sequence[DesignPoint]) -> Table:
    """Return the Pareto-optimal configurations of a front in the order of its first axis."""
    table = _table(
        f"{front.name[0].upper()}{front.name[1:]}", ["layout", front.x_name, front.y_name, "SLO"]
    )
    kept = sorted((at for at in range(len(points)) if front.kept[at]), key=lambda at: front.xs[at])
    for at in kept[:MOST_ROWS]:
        word = ("holds", "green") if points[at].meets_slo else ("missed", "red")
        label = f"{points[at].label} batch {points[at].candidate.tandem.decode.max_batch_size}"
        x, y = f"{front.xs[at]:,.4g}", f"{front.ys[at]:,.4g}"
        table.add_row(label, x, y, Text(word[0], style=word[1]))
    if len(kept) > MOST_ROWS:
        table.caption = f"{len(kept) - MOST_ROWS} more: --json"
    return table


def _needed(answer: StudyResult, before: int | None) -> tuple[str, str, list[str]]:
    """Return GPUs needed, the change against *before*, latencies and the first limit."""
    if answer.plan is None:
        needed = answer.infeasible.nearest_gpus if answer.infeasible else None
        over = answer.infeasible is not None and answer.infeasible.binds == "max_gpus"
        return (str(needed) if over else "none", "", ["", "", answer.reason])
    found = figures(answer.plan)
    against = "" if before is None else f"{found.gpus - before:+d}"
    return str(found.gpus), against, [seconds(found.ttft_s), seconds(found.tpot_s), found.binds]


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="left" if head in LEFT or "." in head else "right")
    return table


def _number(value: float | None, form: str) -> str:
    """Write a number; a hyphen where it is unknown."""
    return "-" if value is None else format(value, form)
