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
    """Yield a row for each statistic."""
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
    differing = sum(change.significant for change in versus.changes)
    title = f"{differing} of {len(versus.changes)} figures differ"
    return document(
        title,
        f"<header><h1>{escape(title)}</h1>{lines}</header>",
        section("Second less first", table(CHANGE_HEADS, change_rows(versus))),
        f'<div class="charts">{"".join(drawn)}</div>',
    )


def probe_rows(search: Search) -> Iterator[tuple[str, ...]]:
    """Yield a row for each try, by rate."""
    words = {True: "holds", False: "misses", None: "on the edge"}
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
    """Say what was found, and how far the plan's word is from it."""
    found = search.found
    if found.requests_per_s is None:
        yield "no rate tried holds the SLO"
    else:
        low = "nothing" if found.low is None else f"{found.low:.2f}"
        high = "nothing tried" if found.high is None else f"{found.high:.2f}"
        yield (
            f"the SLO holds up to {found.requests_per_s:.2f} requests/s "
            f"({low} holds, {high} misses)"
        )
    error = search.error_fraction
    compared = "" if error is None else f": {error:+.0%} of the measured"
    yield (
        f"the plan has it hold up to {search.predicted_requests_per_s:.2f} requests/s{compared}; "
        f"its pools saturate at {search.saturation_requests_per_s:.2f}"
    )


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
    found = search.found
    points = [(p.requests_per_s, p.good_requests_per_s, bool(p.holds)) for p in search.probes]
    marks = {"predicted": search.predicted_requests_per_s}
    if found.requests_per_s is not None:
        marks["measured"] = found.requests_per_s
    legend = (
        '<div class="legend"><span><b class="held"></b>held</span>'
        '<span><b class="missed"></b>missed or on the edge</span>'
        '<span><i class="measured"></i>measured limit</span>'
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
