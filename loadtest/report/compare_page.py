"""Tables and pages of a comparison of two runs, and of a capacity search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.report.charts import goodput_against_load
from loadtest.report.run_page import footer, sentence, values_s
from loadtest.report.table import latency_text, terminal_table
from minicluster.pages.figure import BLUE, ORANGE
from minicluster.pages.latency import LatencyCurve, latency_distribution
from minicluster.pages.page import ChartRow, DataTable, Page, Section
from minicluster.units import seconds, signed_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from loadtest.studies.capacity_search import CapacitySearch
    from loadtest.studies.compare import RunComparison, Side
    from loadtest.verdict.verdict import Judged

CHANGE_HEADS = ("", "first", "second", "difference, 95 %", "")
FOUND_WORDS = {True: "holds", False: "misses", None: "unclear"}


def change_rows(comparison: RunComparison) -> Iterator[tuple[str, ...]]:
    """Yield a row for the requests that met the SLO, then one for each statistic."""
    good = comparison.good
    yield (
        "good requests",
        f"{comparison.first.good_fraction:.2%}",
        f"{comparison.second.good_fraction:.2%}",
        f"{100 * good.low:+z.2f} to {100 * good.high:+z.2f} points",
        "differs" if good.significant else "chance",
    )
    for change in comparison.changes:
        yield (
            f"{change.metric.upper()} {change.statistic}",
            seconds(change.first_s),
            seconds(change.second_s),
            f"{signed_seconds(change.low_s)} to {signed_seconds(change.high_s)}",
            "differs" if change.significant else "chance",
        )


def comparison_lines(comparison: RunComparison) -> Iterator[str]:
    """Yield the two runs, how they are compared, and what weakens the comparison."""
    yield f"first:  {_side(comparison.first)}"
    yield f"second: {_side(comparison.second)}"
    yield (
        "compared request by request: both had the same schedule"
        if comparison.paired
        else "compared as two runs of their own: their schedules differ"
    )
    yield (
        f"marked differences are significant at 5 % for all {len(comparison.changes) + 1} "
        "figures together (Holm); each interval alone has a confidence of 95 %"
    )
    yield from comparison.notes


def comparison_table(comparison: RunComparison) -> Table:
    """Return the table of a terminal."""
    return terminal_table("second less first", CHANGE_HEADS, change_rows(comparison))


def comparison_page(comparison: RunComparison, first: Judged, second: Judged) -> Page:
    """Return the page of both runs: table, and distributions over each other."""
    answered = [judged.window.answered for judged in (first, second)]
    figures = []
    for metric in ("ttft", "tpot"):
        before, after = (values_s(metric, requests) for requests in answered)
        if before and after:
            curves = [
                LatencyCurve(name="first", values_s=before, colour=BLUE),
                LatencyCurve(name="second", values_s=after, colour=ORANGE, dash="dash"),
            ]
            figures.append(latency_distribution(f"{metric.upper()}: distribution", curves))
    differ = [comparison.good.significant, *(change.significant for change in comparison.changes)]
    title = f"{sum(differ)} of {len(differ)} figures differ"
    changes = DataTable(CHANGE_HEADS, tuple(change_rows(comparison)))
    return Page(
        title=title,
        headline=title,
        lines=tuple(map(sentence, comparison_lines(comparison))),
        parts=(Section("Second less first", (changes,)), ChartRow(tuple(figures))),
        footer=footer(),
    )


def probe_heads(search: CapacitySearch) -> tuple[str, ...]:
    """Name the columns of `probe_rows`."""
    latencies = (f"TTFT {search.percentile}", f"TPOT {search.percentile}")
    return ("requests/s", "SLO", "met it", "goodput/s", *latencies, "requests")


def probe_rows(search: CapacitySearch) -> Iterator[tuple[str, ...]]:
    """Yield a row for each probe, by rate."""
    for probe in sorted(search.probes, key=lambda p: p.requests_per_s):
        yield (
            f"{probe.requests_per_s:.2f}",
            FOUND_WORDS[probe.holds],
            f"{probe.attained_fraction:.2%}",
            f"{probe.good_requests_per_s:.2f}",
            latency_text(probe.ttft_s),
            "-" if probe.tpot_s is None else seconds(probe.tpot_s),
            str(probe.num_requests),
        )


def search_lines(search: CapacitySearch) -> Iterator[str]:
    """Yield the bracket of the limit, the error of the plan's limit, and the undecided rates."""
    found, error = search.found, ""
    if found.low is not None and found.high is not None:
        yield (
            f"the SLO holds at {found.low:.2f} requests/s and misses at {found.high:.2f}: "
            "the limit lies between"
        )
        low, high = (search.predicted_requests_per_s / end - 1 for end in (found.high, found.low))
        error = f": {low:+.0%} to {high:+.0%} off the measured limit"
    elif found.low is not None:
        yield f"the SLO holds at {found.low:.2f} requests/s; no probed rate misses"
    else:
        holds = "is known to hold" if found.unclear else "holds"
        yield f"no probed rate {holds} the SLO"
    yield (
        f"the plan predicts a limit of {search.predicted_requests_per_s:.2f} requests/s{error}; "
        f"its pools saturate at {search.saturation_requests_per_s:.2f} requests/s"
    )
    if found.unclear:
        rates = ", ".join(f"{rate:.2f}" for rate in found.unclear)
        yield (
            f"unclear at {rates} requests/s: no run of at most {search.most_requests} requests "
            "(--most-requests) decides whether the SLO holds there"
        )


def search_table(search: CapacitySearch) -> Table:
    """Return the table of a terminal."""
    return terminal_table("probes", probe_heads(search), probe_rows(search))


def search_page(search: CapacitySearch) -> Page:
    """Return the page of a search: goodput against load with its knee, and every probe."""
    first, *more = map(sentence, search_lines(search))
    limits = {"predicted limit": (search.predicted_requests_per_s, ORANGE)}
    if search.found.middle is not None:
        limits["measured limit (middle between both)"] = (search.found.middle, BLUE)
    drawn = goodput_against_load(
        [(p.requests_per_s, p.good_requests_per_s, p.holds) for p in search.probes],
        FOUND_WORDS,
        limits=limits,
    )
    probes = DataTable(probe_heads(search), tuple(probe_rows(search)))
    return Page(
        title=first,
        headline=first,
        lines=tuple(more),
        parts=(ChartRow((drawn,)), Section("Probes", (probes,))),
        footer=footer(),
    )


def _side(side: Side) -> str:
    return (
        f"{side.name}: {side.answered} of {side.requests} answered, "
        f"{side.offered_requests_per_s:.2f} requests/s, {side.good_fraction:.2%} met the SLO "
        f"(95 % interval {side.good_low:.2%} to {side.good_high:.2%}), "
        f"goodput {side.good_requests_per_s:.2f} requests/s"
    )
