"""Predicted against measured times as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from minicluster.units import seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sizing.evidence.coverage import Claim, Coverage
    from sizing.evidence.residual import ErrorSummary
    from sizing.evidence.scalar import Scalars
    from sizing.evidence.validate import RowVerdict, SliceErrors


def errors_table(by: str, slices: Iterable[SliceErrors]) -> Table:
    """Return mean, median and bias of the relative errors of predicted rows."""
    table = Table(
        title=f"Errors by {by}: mean/median/bias", title_justify="left", box=SIMPLE_HEAD,
        pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True,
    )  # fmt: skip
    table.add_column(by, overflow="fold", min_width=16)
    for heading in ("rows", "answered", "infea-\nsible"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("TTFT", "TPOT"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in slices:
        table.add_row(
            each.name,
            str(each.rows),
            f"{each.answered / each.rows:.0%}",
            str(each.infeasible),
            figures(each.ttft),
            figures(each.tpot),
        )
    return table


def tails_table(slices: Iterable[SliceErrors]) -> Table:
    """Return the errors of the p99 of TTFT, for groups in which it was measured."""
    table = Table(title="Errors of TTFT p99: mean/median/bias", title_justify="left")
    for heading in ("", "group", "rows", "TTFT p99"):
        table.add_column(heading, overflow="fold")
    for each in slices:
        if each.ttft_p99 is not None:
            table.add_row(each.by, each.name, str(each.ttft_p99.rows), figures(each.ttft_p99))
    return table


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


def coverage_table(coverages: Iterable[Coverage]) -> Table:
    """Return the share of left-out rows inside their 80 % interval, by source."""
    table = Table(title="80 % intervals on rows left out of them", title_justify="left")
    for heading, justify in (
        ("source", "left"), ("", "left"), ("rows", "right"), ("inside", "right"),
        ("median width", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for found in coverages:
        table.add_row(
            found.source,
            found.quantity.upper(),
            str(found.rows),
            f"{found.covered_fraction:.0%}",
            f"{found.median_width:.0%}",
        )
    return table


def claims_table(claims: Iterable[Claim]) -> Table:
    """Return the share of claims that are right at their bound."""
    found = list(claims)
    levels = sorted({each.confidence for each in found})
    table = Table(title="Claims right at their bound, on rows left out", title_justify="left")
    table.add_column("source")
    table.add_column("")
    for heading in ("rows", *(f"claimed at {level:.0%}" for level in levels)):
        table.add_column(heading, justify="right")
    rows: dict[tuple[str, str], list[Claim]] = {}
    for each in found:
        rows.setdefault((each.source, each.quantity), []).append(each)
    for (source, quantity), group in rows.items():
        shares = (f"{each.bound_fraction:.0%}" for each in group)
        table.add_row(source, quantity.upper(), str(group[0].rows), *shares)
    return table


def refusals_table(refusals: Iterable[tuple[str, int]]) -> Table:
    """Return the reasons why rows are not predicted."""
    table = Table(title="Rows without a prediction", title_justify="left")
    table.add_column("rows", justify="right")
    table.add_column("reason", overflow="fold")
    for reason, count in refusals:
        table.add_row(str(count), reason)
    return table


def infeasible_table(verdicts: Iterable[RowVerdict]) -> Table:
    """Return the rows that are predicted infeasible, with their measured TTFT."""
    table = Table(title="Rows called infeasible", title_justify="left")
    for heading in ("row", "reason", "measured TTFT", "right"):
        table.add_column(heading, overflow="fold")
    words = {True: "yes", False: "no", None: "not measured"}
    for verdict in verdicts:
        measured = verdict.row.ttft_s if verdict.row else None
        table.add_row(
            verdict.id,
            verdict.found.reason,
            "" if measured is None else f"{measured:.1f} s",
            words[verdict.answered],
        )
    return table


def scalars_table(scalars: Iterable[Scalars]) -> Table:
    """Return the scalars of the finest groups."""
    table = Table(title="Scalars", title_justify="left")
    for heading, justify in (
        ("group", "left"), ("rows", "right"), ("prefill", "right"), ("per request", "right"),
        ("decode", "right"), ("per layer", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    found = list(scalars)
    parents = {each.group[:-1] for each in found}
    for each in found:
        if each.group and each.group not in parents:
            table.add_row(
                " / ".join(each.group),
                str(each.rows),
                f"x {each.prefill:.2f}",
                seconds(each.request_s),
                f"x {each.decode:.2f}",
                seconds(each.per_layer_s),
            )
    return table
