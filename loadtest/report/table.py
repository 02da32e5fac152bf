"""The verdict on the terminal: a table *predicted / measured / SLO*, and one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from minicluster.units import seconds
from minicluster.workload.samples import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from loadtest.selftest.selftest import ClientCapacity, ClientError
    from loadtest.verdict.slo import SloResult
    from loadtest.verdict.verdict import Verdict

ROWS = {
    "ttft": ("TTFT", ("mean", "p50", "p90", "p95", "p99")),
    "tpot": ("TPOT", ("mean", "p50", "p90", "p95", "p99")),
    "itl": ("ITL", ("mean", "p99")),
    "longest_stall": ("longest stall", ("p99", "max")),
    "e2e": ("E2E", ("mean", "p99")),
}
CLIENT_HEADS = (
    *("streams", "gap\nms", "events\n/s", "TTFT\np50 ms", "TTFT\np99 ms"),
    *("ITL\np99 ms", "TPOT\np99 ms", "CPU\n%", "fit"),
)
"""Of the client's own error, with their units: whole in a terminal of 80 columns."""
HEADLINES = {
    "met": ("SLO MET", "bold green"),
    "missed": ("SLO MISSED", "bold red"),
    "invalid": ("INVALID RUN", "bold yellow"),
    "inconclusive": ("INCONCLUSIVE", "bold yellow"),
    "failed": ("TARGET FAILED", "bold red"),
    "interrupted": ("INTERRUPTED", "bold yellow"),
}


def bare_milliseconds(value_s: float) -> str:
    """Write seconds as milliseconds, three digits, without the unit, which stands elsewhere."""
    size_s = abs(value_s)
    digits = 2 if size_s < 0.01 else 1 if size_s < 0.1 else 0  # noqa: PLR2004
    return f"{1000 * value_s:z.{digits}f}"


def latency_rows(verdict: Verdict) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield name, predicted, measured, error and SLO of every latency shown."""
    limits = {(p.metric, p.percentile): p.limit_s for p in verdict.promises}
    for metric, (name, statistics) in ROWS.items():
        spread = verdict.latency[metric]
        for statistic in statistics:
            limit_s = limits.get((metric, statistic))
            row = verdict.comparison.row(metric, statistic) if verdict.comparison else None
            yield (
                f"{name} {statistic}",
                seconds(row.predicted_s) if row else "",
                seconds(spread.at(statistic)) if spread else "-",
                f"{row.error_fraction:+z.0%}" if row else "",
                f"< {seconds(limit_s)}" if limit_s else "",
            )


def load_rows(verdict: Verdict) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the same columns for utilisation and throughput."""
    for pool in verdict.pools:
        planned, seen = pool.predicted_utilisation_fraction, pool.measured_utilisation_fraction
        yield (
            f"{pool.role} utilisation",
            "" if planned is None else f"{planned:.0%}",
            "-" if seen is None else f"{seen:.0%}",
            "",
            "",
        )
        yield (
            f"{pool.role} in flight",
            f"{pool.predicted_concurrent:.2f}",
            f"{pool.measured_concurrent:.2f}",
            "",
            "",
        )
    done = verdict.throughput
    yield "requests/s", "", f"{done.answered_requests_per_s:.2f}", "", ""
    yield "goodput requests/s", "", f"{done.good_requests_per_s:.2f}", "", ""
    planned_tokens, tokens = done.predicted_output_tokens_per_s, done.finished_output_tokens_per_s
    yield (
        "output tokens/s",
        "" if planned_tokens is None else f"{planned_tokens:.1f}",
        f"{tokens:.1f}",
        f"{planned_tokens / tokens - 1:+z.0%}" if planned_tokens and tokens else "",
        "",
    )


def outcome_text(verdict: Verdict) -> str:
    """Say how the requests of the window ended."""
    total = sum(verdict.outcomes.values())
    names = OUTCOMES | {"not_sent": "not sent"}
    parts = [f"{count} {names[outcome]}" for outcome, count in verdict.outcomes.items()]
    return f"{total} requests in the window: " + ", ".join(parts)


def headline(verdict: Verdict) -> tuple[str, str]:
    """Return the verdict in words, and what it rests on."""
    promised = ", ".join(
        f"{p.metric.upper()} {p.percentile} < {seconds(p.limit_s)}" for p in verdict.promises
    )
    return HEADLINES[verdict.verdict][0], "; ".join(verdict.reasons) or promised


def stall_text(verdict: Verdict) -> str:
    """Say how many KV transfers seem to have stalled."""
    threshold = seconds(verdict.stalls.threshold_s)
    return (
        f"suspected KV-transfer stalls: {verdict.stalls.count} "
        f"(TTFT above {threshold} that no queue explains)"
    )


def client_text(verdict: Verdict) -> str:
    """Say what the client itself did to the measurement."""
    own = verdict.client
    stamped = f", arrivals stamped by the {own.stamps}" if own.stamps else ""
    return (
        f"client: dispatch lag p99 {seconds(own.dispatch_lag_p99_s)}, "
        f"heartbeat lag p99 {seconds(own.heartbeat_lag_p99_s)}, "
        f"{own.cpu_fraction:.0%} of a core, {own.connections} connections opened and used again"
        f"{stamped}"
    )


def interval_text(promise: SloResult) -> str:
    """Write the interval of a measured percentile."""
    low, high = promise.measured_low_s, promise.measured_high_s
    if low is None:
        return "unbounded"
    return f"{seconds(low)} to {'more' if high is None else seconds(high)}"


def confidence_text(promise: SloResult) -> str:
    """Say how sure the share is that a limit was kept for."""
    return (
        f"{promise.metric.upper()} < {seconds(promise.limit_s)} for "
        f"{promise.attained_fraction:.2%} of {promise.num} (95 % interval "
        f"{promise.attained_low:.2%} to {promise.attained_high:.2%}; "
        f"{promise.design_effect:.1f} weigh as one independent)"
    )


def phases_text(verdict: Verdict) -> str | None:
    """Say which phase explains the difference of predicted and measured; `None`: nobody knows."""
    phases = verdict.comparison.phases if verdict.comparison else None
    if phases is None:
        return None
    rows = ", ".join(
        f"{row.name} {1000 * row.predicted_s:.1f}/{1000 * row.measured_s:.1f} ms"
        for row in phases.rows
    )
    return (
        f"phases predicted/measured: {rows}; {phases.explains} explains "
        f"{phases.share_fraction:.0%} of the difference"
    )


def prediction_text(verdict: Verdict) -> str | None:
    """Say whether the prediction held; `None` without a plan."""
    if verdict.comparison is None:
        return None
    parts = []
    for metric, most in verdict.comparison.tolerance.items():
        row = verdict.comparison.row(metric, "mean")
        error = f"{row.error_fraction:+z.0%}" if row else "not measured"
        sure = ""
        if row and row.error_low is not None and row.error_high is not None:
            sure = f", 95 % interval {row.error_low:+z.0%} to {row.error_high:+z.0%}"
        parts.append(f"{metric.upper()} mean {error} (allowed {most:.0%}{sure})")
    held = "held" if verdict.comparison.held else "did not hold"
    source = {"replayed": "of these very requests", "planned": "of the plan"}
    return f"prediction {source[verdict.comparison.source]} {held}: " + ", ".join(parts)


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print table and verdict."""
    table = Table(title=f"{verdict.setting.model} at {verdict.setting.host}", title_style="bold")
    table.add_column("")
    for name in ("predicted", "measured", "error", "SLO"):
        table.add_column(name, justify="right")
    for rows in (latency_rows(verdict), load_rows(verdict)):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    word, why = headline(verdict)
    lines = [
        outcome_text(verdict),
        stall_text(verdict),
        client_text(verdict),
        *verdict.notes,
        *map(confidence_text, verdict.promises),
    ]
    if told := phases_text(verdict):
        lines.append(told)
    if said := prediction_text(verdict):
        lines.append(said)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    style = HEADLINES[verdict.verdict][1]
    console.print(Text(word, style=style) + Text(f"  {why}"), soft_wrap=True)


def print_client_errors(errors: Sequence[ClientError], console: Console) -> None:
    """Print the client's own error, a row each load: so many streams, with a gap between tokens."""
    title = "client error: measured less what the bundled server did"
    table = Table(title=title, show_edge=False)  # 80 columns have no room for one
    for name in CLIENT_HEADS:
        table.add_column(name, justify="left" if name == "fit" else "right")
    for error in errors:
        table.add_row(
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
    console.print(table)


def capacity_text(capacity: ClientCapacity) -> str:
    """Say what one client process bears on this machine."""
    if not capacity.held:
        return "capacity: below the first load tried"
    last = capacity.tried[-1]
    beyond = (
        f"saturated at {last.events_per_s:,.0f}"
        if last.saturated
        else f"not saturated by {last.streams} streams"
    )
    return (
        f"capacity of one client process: {capacity.events_per_s:,.0f} events/s followed "
        f"({capacity.events_per_s_per_core:,.0f} a core), {beyond}"
    )
