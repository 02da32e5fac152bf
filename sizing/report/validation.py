"""Predicted against measured times as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Column

from minicluster.units import seconds
from sizing.report.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from sizing.evidence.coverage import Claim, Coverage
    from sizing.evidence.residual import ErrorSummary
    from sizing.evidence.scalar import Scalars
    from sizing.evidence.validate import RowVerdict, SliceErrors


def errors_table(by: str, slices: Iterable[SliceErrors]) -> Table:
    """Return mean, median and bias of the relative errors of predicted rows."""
    heads = ("rows", "answered", "infea-\nsible", "TTFT", "TPOT")
    rows = (
        (
            each.name,
            str(each.rows),
            f"{each.answered / each.rows:.0%}",
            str(each.infeasible),
            figures(each.ttft),
            figures(each.tpot),
        )
        for each in slices
    )
    columns = [Column(head, justify="right", no_wrap=True) for head in heads]
    return table(
        f"Errors by {by}: mean/median/bias",
        [Column(by, overflow="fold", min_width=16), *columns],
        rows,
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        collapse_padding=True,
    )


def tails_table(slices: Iterable[SliceErrors]) -> Table:
    """Return the errors of the p99 of TTFT, for groups in which it was measured."""
    rows = (
        (each.by, each.name, str(each.ttft_p99.rows), figures(each.ttft_p99))
        for each in slices
        if each.ttft_p99 is not None
    )
    return table(
        "Errors of TTFT p99: mean/median/bias", _folded("", "group", "rows", "TTFT p99"), rows
    )


def figures(summary: ErrorSummary | None) -> str:
    """Write mean error, median error and bias."""
    if summary is None:
        return ""
    return (
        f"{_percent(summary.mean)}/{_percent(summary.median)}/{_percent(summary.bias, sign='+')} %"
    )


def _percent(share: float, *, sign: str = "") -> str:
    """Write a share in percent, with one decimal below 100 %."""
    digits = 0 if abs(share) >= 1 else 1
    return f"{100 * share:{sign}.{digits}f}"


def _folded(*heads: str) -> list[Column]:
    """Return columns of words, long ones on several lines."""
    return [Column(head, overflow="fold") for head in heads]


def coverage_table(coverages: Iterable[Coverage]) -> Table:
    """Return the share of left-out rows inside their 80 % interval, by source."""
    rows = (
        (
            found.source,
            found.quantity.upper(),
            str(found.rows),
            f"{found.covered_fraction:.0%}",
            f"{found.median_width:.0%}",
        )
        for found in coverages
    )
    heads = ("source", "", "rows", "inside", "median width")
    return table("80 % intervals on rows left out of them", heads, rows, left=("",))


def claims_table(claims: Iterable[Claim]) -> Table:
    """Return the share of claims that are right at their bound."""
    found = list(claims)
    levels = sorted({each.confidence for each in found})
    groups: dict[tuple[str, str], list[Claim]] = {}
    for each in found:
        groups.setdefault((each.source, each.quantity), []).append(each)
    rows = (
        (
            source,
            quantity.upper(),
            str(group[0].rows),
            *(f"{each.bound_fraction:.0%}" for each in group),
        )
        for (source, quantity), group in groups.items()
    )
    heads = ("source", "", "rows", *(f"claimed at {level:.0%}" for level in levels))
    return table("Claims right at their bound, on rows left out", heads, rows, left=("",))


def refusals_table(refusals: Iterable[tuple[str, int]]) -> Table:
    """Return the reasons why rows are not predicted."""
    heads = [Column("rows", justify="right"), *_folded("reason")]
    rows = ((str(count), reason) for reason, count in refusals)
    return table("Rows without a prediction", heads, rows)


def infeasible_table(verdicts: Iterable[RowVerdict]) -> Table:
    """Return the rows that are predicted infeasible, with their measured TTFT."""
    words = {True: "yes", False: "no", None: "not measured"}
    rows = []
    for verdict in verdicts:
        ttft_s = verdict.row.ttft_s if verdict.row else None
        measured = "" if ttft_s is None else f"{ttft_s:.1f} s"
        rows.append((verdict.id, verdict.found.reason, measured, words[verdict.answered]))
    heads = _folded("row", "reason", "measured TTFT", "right")
    return table("Rows called infeasible", heads, rows)


def scalars_table(scalars: Iterable[Scalars]) -> Table:
    """Return the scalars of the finest groups."""
    found = list(scalars)
    parents = {each.group[:-1] for each in found}
    rows = (
        (
            " / ".join(each.group),
            str(each.rows),
            f"x {each.prefill:.2f}",
            seconds(each.request_s),
            f"x {each.decode:.2f}",
            seconds(each.per_layer_s),
        )
        for each in found
        if each.group and each.group not in parents
    )
    heads = ("group", "rows", "prefill", "per request", "decode", "per layer")
    return table("Scalars", heads, rows)
