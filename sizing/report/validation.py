"""Predicted against measured times as tables."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from sizing.evidence.errors import ErrorSummary, SliceErrors, scored, slices
from sizing.evidence.validate import without_errors
from sizing.report.tables import columns_table, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sizing.evidence.evidence import Claim, Coverage, HeldOutCoverage, Tried
    from sizing.evidence.prediction import RowVerdict

EXAMPLES = 5
"""Rows named for each reason: the whole list of a large file hides the errors."""


def validation_tables(verdicts: Sequence[RowVerdict], found: Tried) -> Iterator[Table]:
    """Yield the rows that have no errors, then errors by group and coverage of intervals."""
    rows = without_errors(verdicts)
    if rows:
        yield without_errors_table(rows)
    errors = slices(scored(verdicts))
    for by, group in groupby(errors, key=lambda each: each.by):
        yield errors_table(by, list(group))
    tails = [each for each in errors if each.ttft_p99 or each.tpot_p99]
    if tails:
        yield tails_table(tails)
    yield coverage_table(found.coverages)
    yield claims_table(found.claims)


def errors_table(by: str, errors: Sequence[SliceErrors]) -> Table:
    """Return mean, median and bias of the relative errors of predicted rows."""
    columns = {
        "rows": [str(each.rows) for each in errors],
        "answered": [f"{each.answered / each.rows:.0%}" for each in errors],
        "infea-\nsible": [str(each.infeasible) for each in errors],
        "TTFT": [figures(each.ttft) for each in errors],
        "TPOT": [figures(each.tpot) for each in errors],
    }
    heads = [Column(head, justify="right", no_wrap=True) for head in columns]
    return table(
        f"Errors by {by}: mean/median/bias",
        [Column(by, overflow="fold", min_width=16), *heads],
        zip([each.name for each in errors], *columns.values(), strict=True),
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        collapse_padding=True,
    )


def tails_table(errors: Sequence[SliceErrors]) -> Table:
    """Return the errors of the p99 of TTFT and TPOT, of groups in which one was measured."""
    rows = (
        (
            *(each.by, each.name),
            str(max(tail.rows for tail in (each.ttft_p99, each.tpot_p99) if tail)),
            *(figures(each.ttft_p99), figures(each.tpot_p99)),
        )
        for each in errors
    )
    heads = ("", Column("group", overflow="fold"), "rows", "TTFT p99", "TPOT p99")
    return table("Errors of p99: mean/median/bias", heads, rows)


def figures(summary: ErrorSummary | None) -> str:
    """Write mean error, median error and bias."""
    if summary is None:
        return ""
    return (
        f"{_percent(summary.mean)}/{_percent(summary.median)}/{_percent(summary.bias, sign='+')} %"
    )


def _percent(share: float, *, sign: str = "") -> str:
    digits = 0 if abs(share) >= 1 else 1
    return f"{100 * share:{sign}.{digits}f}"


def coverage_table(found: Sequence[Coverage]) -> Table:
    """Return the share of left-out rows inside their 80 % interval, by source."""
    columns = {
        "source": [each.source for each in found],
        "": [each.quantity.upper() for each in found],
        "rows": [str(each.rows) for each in found],
        "inside": [f"{each.covered_fraction:.0%}" for each in found],
        "median width": [f"{each.median_width:.0%}" for each in found],
    }
    return columns_table("80 % intervals on rows left out of them", columns, left=("",))


def claims_table(found: Sequence[Claim]) -> Table:
    """Return the share of claims that are right at their bound."""
    levels = sorted({each.confidence for each in found})
    groups: dict[tuple[str, str], list[Claim]] = {}
    for each in found:
        groups.setdefault((each.source, each.quantity), []).append(each)
    rows = (
        (
            *(source, quantity.upper(), str(group[0].rows)),
            *(f"{each.bound_fraction:.0%}" for each in group),
        )
        for (source, quantity), group in groups.items()
    )
    heads = ("source", "", "rows", *(f"claimed at {level:.0%}" for level in levels))
    return table("Claims right at their bound, on rows left out", heads, rows, left=("",))


def left_out_tables(found: Sequence[HeldOutCoverage]) -> Iterator[Table]:
    """Yield, per split, coverage and width of intervals around groups that were left out."""
    for split, group in groupby(found, key=lambda each: each.split):
        rows = [
            (
                *(each.of, each.name, each.quantity.upper(), str(each.rows)),
                *(f"{each.covered_fraction:.0%}", f"{each.median_width:.0%}"),
                f"{100 * each.median_error:.1f} %",
            )
            for each in group
        ]
        heads = ("", "name", "", "rows", "inside", "median width", "median error")
        yield table(f"80 % intervals learned without each {split}", heads, rows, left=("", "name"))


def without_errors_table(found: Mapping[tuple[str, str], Sequence[str]]) -> Table:
    """Return the number of rows that have no errors, by status and reason, with examples."""
    rows = (
        (status, reason, str(len(ids)), ", ".join(ids[:EXAMPLES]))
        for (status, reason), ids in found.items()
    )
    return table(
        "Rows without errors",
        ("", Column("reason", overflow="fold"), "rows", Column("such as", overflow="fold")),
        rows,
        caption="every row with its reason: -o FILE, or --json",
        caption_justify="left",
    )
