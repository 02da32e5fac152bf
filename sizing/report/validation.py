"""Predicted against measured times as tables."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from minicluster.pages.shown import sections_of
from sizing.evidence.errors import ErrorSummary, SliceErrors, scored, slices
from sizing.evidence.validate import Validated, without_errors
from sizing.report.tables import columns_table, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from minicluster.pages.page import ChartRow, Section
    from sizing.evidence.evidence import Claim, Coverage, HeldOutCoverage

EXAMPLES = 5
"""Rows named for each reason: the whole list of a large file hides the errors."""


@sections_of.register(Validated)
def validation_sections(found: Validated) -> list[Section | ChartRow]:
    """Return the rows that have no errors, then errors by group and coverage of intervals."""
    return [*_validation_sections(found)]


def _validation_sections(found: Validated) -> Iterator[Section]:
    rows = without_errors(found.verdicts)
    if rows:
        yield without_errors_table(rows)
    errors = slices(scored(found.verdicts))
    for by, group in groupby(errors, key=lambda row: row.by):
        yield errors_table(by, list(group))
    tails = [row for row in errors if row.ttft_p99 or row.tpot_p99]
    if tails:
        yield tails_table(tails)
    yield coverage_table(found.tried.coverages)
    yield claims_table(found.tried.claims)
    yield from left_out_tables(found.left_out)


def errors_table(by: str, errors: Sequence[SliceErrors]) -> Section:
    """Return mean, median and bias of the relative errors of predicted rows."""
    columns = {
        by: [row.name for row in errors],
        "rows": [str(row.rows) for row in errors],
        "answered": [f"{row.answered / row.rows:.0%}" for row in errors],
        "infeasible": [str(row.infeasible) for row in errors],
        "TTFT": [figures(row.ttft) for row in errors],
        "TPOT": [figures(row.tpot) for row in errors],
    }
    title = f"Errors by {by}: mean/median/bias"
    return columns_table(title, columns, words=(by,), details=("infeasible", "answered"))


def tails_table(errors: Sequence[SliceErrors]) -> Section:
    """Return the errors of the p99 of TTFT and TPOT, of groups in which one was measured."""
    rows = (
        (
            *(row.by, row.name),
            str(max(tail.rows for tail in (row.ttft_p99, row.tpot_p99) if tail)),
            *(figures(row.ttft_p99), figures(row.tpot_p99)),
        )
        for row in errors
    )
    heads = ("by", "group", "rows", "TTFT p99", "TPOT p99")
    return table("Errors of p99: mean/median/bias", heads, rows, words=("group",))


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


def coverage_table(coverages: Sequence[Coverage]) -> Section:
    """Return the share of left-out rows inside their 80 % interval, by source."""
    columns = {
        "source": [row.source for row in coverages],
        "": [row.quantity.upper() for row in coverages],
        "rows": [str(row.rows) for row in coverages],
        "inside": [f"{row.covered_fraction:.0%}" for row in coverages],
        "median width": [f"{row.median_width:.0%}" for row in coverages],
    }
    return columns_table("80 % intervals on rows left out of them", columns, words=("",))


def claims_table(claims: Sequence[Claim]) -> Section:
    """Return the share of claims that are right at their bound."""
    levels = sorted({claim.confidence for claim in claims})
    groups: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        groups.setdefault((claim.source, claim.quantity), []).append(claim)
    rows = (
        (
            *(source, quantity.upper(), str(group[0].rows)),
            *(f"{claim.bound_fraction:.0%}" for claim in group),
        )
        for (source, quantity), group in groups.items()
    )
    heads = ("source", "", "rows", *(f"claimed at {level:.0%}" for level in levels))
    return table("Claims right at their bound, on rows left out", heads, rows, words=("",))


def left_out_tables(coverages: Sequence[HeldOutCoverage]) -> Iterator[Section]:
    """Yield, per split, coverage and width of intervals around groups that were left out."""
    for split, group in groupby(coverages, key=lambda row: row.split):
        rows = [
            (
                *(row.of, row.name, row.quantity.upper(), str(row.rows)),
                *(f"{row.covered_fraction:.0%}", f"{row.median_width:.0%}"),
                f"{100 * row.median_error:.1f} %",
            )
            for row in group
        ]
        heads = ("", "name", "of", "rows", "inside", "median width", "median error")
        title = f"80 % intervals learned without each {split}"
        yield table(title, heads, rows, words=("name", "of"))


def without_errors_table(ids_by_reason: Mapping[tuple[str, str], Sequence[str]]) -> Section:
    """Return the number of rows that have no errors, by status and reason, with examples."""
    rows = (
        (status, reason, str(len(ids)), ", ".join(ids[:EXAMPLES]))
        for (status, reason), ids in ids_by_reason.items()
    )
    heads = ("status", "reason", "rows", "such as")
    notes = ["every row with its reason: -o FILE, or --json"]
    return table("Rows without errors", heads, rows, words=("reason", "such as"), notes=notes)
