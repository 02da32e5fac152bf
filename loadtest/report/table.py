"""The verdict on the terminal: a table of predicted, measured and SLO, and lines below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from minicluster.phases import label
from minicluster.units import seconds
from minicluster.workload.samples import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

    from loadtest.selftest.selftest import ClientError
    from loadtest.verdict.slo import SloResult
    from loadtest.verdict.verdict import Verdict

ROWS = {
    "ttft": ("TTFT", ("mean", "p50", "p90", "p95", "p99")),
    "tpot": ("TPOT", ("mean", "p50", "p90", "p95", "p99")),
    "itl": ("ITL", ("mean", "p99")),
    "longest_stall": ("longest stall", ("p99", "max")),
    "e2e": ("E2E", ("mean", "p99")),
}
LATENCY_HEADS = ("", "predicted", "measured", "error", "at pace", "SLO")
"""Heads of `latency_rows`; `at pace`: the error had the engines been as fast as they were."""

CLIENT_HEADS = (
    *("streams", "gap\nms", "events\n/s", "TTFT\np50 ms", "TTFT\np99 ms"),
    *("ITL\np99 ms", "TPOT\np99 ms", "CPU\n%", "fit"),
)
"""Column heads of the client's own error, narrow enough for a terminal of 80 columns."""
WORDS = {"", "fit"}  # heads of columns of words; all others hold numbers

HEADLINES = {
    "met": ("SLO MET", "bold green"),
    "missed": ("SLO MISSED", "bold red"),
    "invalid": ("INVALID RUN", "bold yellow"),
    "inconclusive": ("INCONCLUSIVE", "bold yellow"),
    "failed": ("TARGET FAILED", "bold red"),
    "interrupted": ("INTERRUPTED", "bold yellow"),
}


def bare_milliseconds(value_s: float) -> str:
    """Return *value_s* in ms without the unit, which stands in the column head."""
    size_s = abs(value_s)
    digits = 2 if size_s < 0.01 else 1 if size_s < 0.1 else 0  # noqa: PLR2004
    return f"{1000 * value_s:z.{digits}f}"


def latency_text(value_s: float | None) -> str:
    """Return a percentile; `None`: so many requests have no answer that it is infinite."""
    return "infinite" if value_s is None else seconds(value_s)


def latency_rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each latency, as in `LATENCY_HEADS`."""
    limits = {(p.metric, p.percentile): p for p in verdict.slo if not p.of}
    for metric, (name, statistics) in ROWS.items():
        summary = verdict.latency[metric]
        for statistic in statistics:
            limit = limits.pop((metric, statistic), None)
            row = verdict.comparison.row(metric, statistic) if verdict.comparison else None
            yield (
                f"{name} {statistic}",
                seconds(row.predicted_s) if row else "",
                seconds(summary.at(statistic)) if summary else "-",
                f"{row.error_fraction:+z.0%}" if row else "",
                _signed(row.error_at_pace_fraction) if row else "",
                f"< {seconds(limit.limit_s)}" if limit else "",
            )
    for result in (*limits.values(), *(p for p in verdict.slo if p.of)):
        yield (
            result.name,
            "",
            latency_text(result.measured_s),
            "",
            "",
            f"< {seconds(result.limit_s)}",
        )


def _signed(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:+z.0%}"


def load_rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """Yield the same columns for utilisation and throughput."""
    for pool in verdict.pools:
        predicted = pool.predicted_utilisation_fraction
        busy = "" if predicted is None else f"{predicted:.0%}"
        yield f"{pool.role} utilisation", busy, "-", "", "", ""
        foretold, seen = f"{pool.predicted_concurrent:.2f}", f"{pool.measured_concurrent:.2f}"
        yield f"{pool.role} in flight", foretold, seen, "", "", ""
    done = verdict.throughput
    yield "requests/s", "", f"{done.answered_requests_per_s:.2f}", "", "", ""
    for name, predicted, measured in (
        ("goodput requests/s", done.predicted_good_requests_per_s, done.good_requests_per_s),
        ("output tokens/s", done.predicted_output_tokens_per_s, done.finished_output_tokens_per_s),
    ):
        error = f"{predicted / measured - 1:+z.0%}" if predicted and measured else ""
        yield (
            name,
            "" if predicted is None else f"{predicted:.4g}",
            f"{measured:.4g}",
            error,
            "",
            "",
        )


def filled_columns(
    heads: Sequence[str], *groups: Iterable[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """Return heads, then all rows, without the columns in which no row has anything."""
    rows = [row for group in groups for row in group]
    kept = [at for at in range(len(heads)) if at == 0 or any(row[at] for row in rows)]
    return tuple(tuple(row[at] for at in kept) for row in (heads, *rows))


def outcome_text(verdict: Verdict) -> str:
    """Return the outcomes of the window's requests."""
    total = sum(verdict.outcomes.values())
    names = OUTCOMES | {"not_sent": "not sent"}
    parts = [f"{count} {names[outcome]}" for outcome, count in verdict.outcomes.items()]
    return f"{total} requests in the window: " + ", ".join(parts)


def headline(verdict: Verdict) -> tuple[str, str]:
    """Return the verdict in words, and its reasons."""
    limits = ", ".join(f"{p.name} < {seconds(p.limit_s)}" for p in verdict.slo)
    why = "; ".join(verdict.reasons) or limits
    return HEADLINES[verdict.verdict][0], f"{why}{verdict.caveat}"


def stall_text(verdict: Verdict) -> str:
    """Return the number of suspected KV transfer stalls."""
    threshold = seconds(verdict.stalls.threshold_s)
    return (
        f"suspected KV-transfer stalls: {verdict.stalls.count} "
        f"(TTFT above {threshold} that no queue explains)"
    )


def client_text(verdict: Verdict) -> str:
    """Return the client's own part in the measurement."""
    own = verdict.client
    stamped = f", arrivals timestamped by the {own.stamps}" if own.stamps else ""
    return (
        f"client: dispatch lag p99 {seconds(own.dispatch_lag_p99_s)}, "
        f"heartbeat lag p99 {seconds(own.heartbeat_lag_p99_s)}, "
        f"{own.cpu_fraction:.0%} of a core, {own.connections} connections opened and reused"
        f"{stamped}"
    )


def interval_text(result: SloResult) -> str:
    """Return the interval of a measured percentile."""
    low, high = result.measured_low_s, result.measured_high_s
    if low is None:
        return "unbounded"
    return f"{seconds(low)} to {'more' if high is None else seconds(high)}"


def phases_text(verdict: Verdict) -> str | None:
    """Return the phases and which one explains the error; `None` without a simulation."""
    phases = verdict.comparison.phases if verdict.comparison else None
    if phases is None:
        return None
    rows = ", ".join(
        f"{label(row.name)} {1000 * row.predicted_s:.1f}/{1000 * row.measured_s:.1f} ms"
        for row in phases.rows
    )
    return (
        f"phases predicted/measured: {rows}; {label(phases.explains)} explains "
        f"{phases.share_fraction:.0%} of the difference"
    )


def prediction_text(verdict: Verdict) -> str | None:
    """Return whether the prediction held, and its errors; `None` without a plan."""
    if verdict.comparison is None:
        return None
    parts = []
    for metric, most in verdict.comparison.tolerance.items():
        row = verdict.comparison.row(metric, "mean")
        error = f"{row.judged_error_fraction:+z.0%}" if row else "not measured"
        interval = ""
        if row and row.error_low is not None and row.error_high is not None:
            raw = f"{row.error_fraction:+z.0%} " if verdict.comparison.pace else ""
            interval = f"; {raw}as planned" if raw else ""
            interval += f", 95 % interval {row.error_low:+z.0%} to {row.error_high:+z.0%}"
        parts.append(f"{metric.upper()} mean {error} (tolerance {most:.0%}{interval})")
    held = "held" if verdict.comparison.held else "did not hold"
    source = {"resimulated": "for these requests", "planned": "of the plan"}
    pace = " at the engines' pace" if verdict.comparison.pace else ""
    return f"prediction {source[verdict.comparison.source]}{pace} {held}: " + ", ".join(parts)


def pace_text(verdict: Verdict) -> str | None:
    """Return how fast the engines were against their plan; `None`: they did not report it."""
    if verdict.comparison is None or not verdict.comparison.pace:
        return None
    parts = [
        f"{role} {abs(factor - 1):.0%} {'slower' if factor >= 1 else 'faster'}"
        for role, factor in verdict.comparison.pace.items()
    ]
    return f"engine steps against those of the calibration, for the same work: {', '.join(parts)}"


def terminal_table(title: str, heads: Sequence[str], *groups: Iterable[Sequence[str]]) -> Table:
    """Return a table with a line below each group of rows; words are left, numbers right."""
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head in WORDS else "right")
    for rows in groups:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print table and verdict."""
    title = f"{verdict.metadata.model} at {verdict.metadata.host}{verdict.caveat}"
    latencies, loads = list(latency_rows(verdict)), list(load_rows(verdict))
    heads, *rows = filled_columns(LATENCY_HEADS, latencies, loads)
    table = terminal_table(title, heads, rows[: len(latencies)], rows[len(latencies) :])
    table.title_style = "bold"
    console.print(table)
    word, why = headline(verdict)
    lines = [
        outcome_text(verdict),
        stall_text(verdict),
        client_text(verdict),
        *verdict.notes,
        *(f"{result.attained_text}{verdict.caveat}" for result in verdict.slo),
    ]
    lines += [
        text
        for text in (phases_text(verdict), pace_text(verdict), prediction_text(verdict))
        if text
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    style = HEADLINES[verdict.verdict][1]
    console.print(Text(word, style=style) + Text(f"  {why}"), soft_wrap=True)


def print_client_errors(errors: Sequence[ClientError], console: Console) -> None:
    """Print the client's own error, one row for each number of streams and interval of tokens."""
    title = "client error: measured minus the mock server's own times"
    rows = [
        (
            str(error.streams),
            f"{1000 * error.itl_s:g}",
            f"{error.events_per_s:.0f}",
            bare_milliseconds(error.ttft_error_p50_s),
            bare_milliseconds(error.ttft_error_p99_s),
            bare_milliseconds(error.itl_error_p99_s),
            bare_milliseconds(error.tpot_error_p99_s),
            f"{100 * error.cpu_fraction:.0f}",
            "yes" if error.fit else "SATURATED" if error.saturated else "NO",
        )
        for error in errors
    ]
    table = terminal_table(title, CLIENT_HEADS, rows)
    table.show_edge = False  # 80 columns have no room for one
    console.print(table)


def capacity_text(tried: Sequence[ClientError]) -> str:
    """Return the capacity of one client process: the highest load at which a run is valid."""
    best = max((error for error in tried if error.fit), key=lambda e: e.events_per_s, default=None)
    if best is None:
        return "capacity: below the first load tried"
    last = tried[-1]
    beyond = (
        f"saturated at {last.events_per_s:,.0f}"
        if last.saturated
        else f"not saturated by {last.streams} streams"
    )
    return (
        f"capacity of one client process: {best.events_per_s:,.0f} events/s followed "
        f"({best.events_per_s / best.cpu_fraction:,.0f} a core), {beyond}"
    )
