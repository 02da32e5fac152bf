"""Two runs, or the tries of a search, as tables and self-contained pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from loadtest.chart import distribution, goodput
from loadtest.evidence import evidence_of
from loadtest.html import document, escape, section, table
from loadtest.table import milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.run import Run
    from loadtest.search import Search
    from loadtest.versus import Side, Versus

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
CHANGE_HEADS = ("", "first", "second", "difference, 95 %", "")
PROBE_HEADS = ("requests/s", "SLO", "attained", "goodput/s", "TTFT", "TPOT", "requests")


def change_rows(versus: Versus) -> Iterator[tuple[str, ...]]:
    """Yield a row for the requests that met the SLO, then one for each statistic."""
    good = versus.good
    yield (
        "good requests",
        f"{versus.first.good_fraction:.2%}",
        f"{versus.second.good_fraction:.2%}",
        f"{100 * good.low:+.2f} to {100 * good.high:+.2f} points",
        "differs" if good.significant else "chance",
    )
    for change in versus.changes:
        yield (
            f"{NAMES[change.metric]} {change.statistic}",
            milliseconds(change.first_s),
            milliseconds(change.second_s),
            f"{1000 * change.low_s:+.1f} to {1000 * change.high_s:+.1f} ms",
            "differs" if change.significant else "chance",
        )


def versus_lines(versus: Versus) -> Iterator[str]:
    """Say which runs they are, and what weakens the comparison."""
    yield f"first:  {_side(versus.first)}"
    yield f"second: {_side(versus.second)}"
    yield (
        "compared request by request: both had the same schedule"
        if versus.paired
        else "compared as two runs of their own: their schedules differ"
    )
    yield (
        f"`differs` is more than chance at 5 % for all {len(versus.changes) + 1} figures together; "
        "each interval is one of 95 % by itself"
    )
    yield from versus.notes


def versus_table(versus: Versus) -> Table:
    """Return the table of a terminal."""
    found = Table(title="second less first")
    for head in CHANGE_HEADS:
        found.add_column(head, justify="right" if head else "left")
    for row in change_rows(versus):
        found.add_row(*row)
    return found


def versus_page(versus: Versus, first: Run, second: Run) -> str:
    """Draw both runs: table, and distributions over each other."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in versus_lines(versus))
    drawn = []
    for metric in ("ttft", "tpot"):
        values = [
            [v for s in evidence_of(run).answered if (v := getattr(s, f"{metric}_s")) is not None]
            for run in (first, second)
        ]
        if all(values):
            legend = (
                '<div class="legend"><span><i class="measured"></i>first</span>'
                '<span><i class="predicted"></i>second</span></div>'
            )
            chart = distribution(values[0], predicted_s={}, foretold_s=values[1], limit=None)
            drawn.append(section(f"{NAMES[metric]}: distribution", legend + chart))
    marks = [versus.good.significant, *(change.significant for change in versus.changes)]
    title = f"{sum(marks)} of {len(marks)} figures differ"
    return document(
        title,
        f"<header><h1>{escape(title)}</h1>{lines}</header>",
        section("Second less first", table(CHANGE_HEADS, change_rows(versus))),
        f'<div class="charts">{"".join(drawn)}</div>',
    )


def probe_rows(search: Search) -> Iterator[tuple[str, ...]]:
    """Yield a row for each try, by rate."""
    words = {True: "holds", False: "misses", None: "open"}
    for probe in sorted(search.probes, key=lambda p: p.requests_per_s):
        yield (
            f"{probe.requests_per_s:.2f}",
            words[probe.holds],
            f"{probe.attained_fraction:.2%}",
            f"{probe.good_requests_per_s:.2f}",
            "endless" if probe.ttft_s is None else milliseconds(probe.ttft_s),
            "-" if probe.tpot_s is None else milliseconds(probe.tpot_s),
            str(probe.num_requests),
        )


def search_lines(search: Search) -> Iterator[str]:
    """Say between which tries the limit lies, and how far the plan's word is from it."""
    found, error = search.found, ""
    if found.low is not None and found.high is not None:
        yield (
            f"the SLO holds at {found.low:.2f} requests/s and misses at {found.high:.2f}: "
            f"the limit lies between{_unclear(search)}"
        )
        low, high = (search.predicted_requests_per_s / end - 1 for end in (found.high, found.low))
        error = f": {low:+.0%} to {high:+.0%} of the measured"
    elif found.low is not None:
        yield f"the SLO holds at {found.low:.2f} requests/s; no rate tried misses{_unclear(search)}"
    else:
        holds = "is known to hold" if found.unclear else "holds"
        yield f"no rate tried {holds} the SLO{_unclear(search)}"
    yield (
        f"the plan has it hold up to {search.predicted_requests_per_s:.2f} requests/s{error}; "
        f"its pools saturate at {search.saturation_requests_per_s:.2f}"
    )


def _unclear(search: Search) -> str:
    """Name the rates that may hold or miss, for all that the longest runs tell."""
    rates = ", ".join(f"{rate:.2f}" for rate in search.found.unclear)
    most = f"of at most {search.most_requests} requests (--most-requests)"
    return f"; no run {most} tells at {rates}" if rates else ""


def search_table(search: Search) -> Table:
    """Return the table of a terminal."""
    found = Table(title=f"tries, latencies at {search.percentile}")
    for head in PROBE_HEADS:
        found.add_column(head, justify="right")
    for row in probe_rows(search):
        found.add_row(*row)
    return found


def search_page(search: Search) -> str:
    """Draw goodput against load with its knee."""
    lines = list(search_lines(search))
    middle = search.found.middle
    points = [(p.requests_per_s, p.good_requests_per_s, bool(p.holds)) for p in search.probes]
    marks = {"predicted": search.predicted_requests_per_s}
    if middle is not None:
        marks["measured"] = middle
    legend = (
        '<div class="legend"><span><b class="held"></b>held</span>'
        '<span><b class="missed"></b>missed or open</span>'
        '<span><i class="measured"></i>middle of the bracket</span>'
        '<span><i class="limit-predicted"></i>predicted limit</span></div>'
    )
    return document(
        lines[0],
        f"<header><h1>{escape(lines[0])}</h1><p>{escape(lines[1])}</p></header>",
        section("Goodput against load", legend + goodput(points, marks)),
        section("Tries", table(PROBE_HEADS, probe_rows(search))),
    )


def _side(side: Side) -> str:
    return (
        f"{side.name}: {side.answered} of {side.requests} answered, "
        f"{side.offered_requests_per_s:.2f} requests/s, {side.good_fraction:.2%} met the SLO "
        f"(95 % {side.good_low:.2%} to {side.good_high:.2%}), "
        f"goodput {side.good_requests_per_s:.2f}/s"
    )
