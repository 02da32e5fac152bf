from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.report.chart import distribution, over_time, round_ticks
from loadtest.report.page import page
from loadtest.report.table import print_verdict
from loadtest.verdict.prediction import TOLERANCE
from loadtest.verdict.verdict import conclude

if TYPE_CHECKING:
    from conftest import RunMaker, SampleMaker

    from minicluster.workload.samples import Sample

VOID = {"meta", "br", "line", "circle", "rect", "polyline"}


class Checker(HTMLParser):
    """Collect what a page loads, and whether its elements close in order."""

    def __init__(self) -> None:
        """Start with nothing open."""
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element."""
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "data"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that it closes the last one open."""
        if tag not in VOID:
            assert self.open.pop() == tag


def check(html: str) -> Checker:
    """Parse *html* to its end."""
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


@pytest.fixture
def samples(make_sample: SampleMaker) -> list[Sample]:
    """Answer 3,200 requests, one failed."""
    made = [make_sample(k, k / 480, ttft_s=0.05 + k * 7919 % 4800 / 48000) for k in range(4800)]
    failed = replace(made[7], outcome="cut", chunk_s=(), detail="<script>")
    return [*made[:7], failed, *made[8:]]


def test_page_loads_nothing(make_run: RunMaker, samples: list[Sample]) -> None:
    """The page is self-contained: no address, script or import in it, and four charts."""
    run = make_run(samples)
    html = page(run, conclude(run, TOLERANCE, require_prediction=False))
    seen = check(html)

    assert seen.loads == []
    assert seen.counts["svg"] == 4
    assert "script" not in seen.counts
    assert not re.search(r"url\(|@import|<link", html)


def test_page_says_the_verdict(make_run: RunMaker, samples: list[Sample]) -> None:
    """Verdict, prediction and SLO stand in the page."""
    run = make_run(samples)
    html = page(run, conclude(run, TOLERANCE, require_prediction=False))

    assert "<h1>SLO MET</h1>" in html
    assert "Prediction of the plan did not hold" in html
    assert "1 cut mid-stream" in html


@pytest.mark.parametrize("stop", ["complete", "died", "interrupted"])
def test_page_without_any_answer(make_run: RunMaker, samples: list[Sample], stop: str) -> None:
    """A run in which nothing was answered still has a page."""
    run = make_run([replace(s, outcome="refused", chunk_s=()) for s in samples], stop=stop)

    check(page(run, conclude(run, TOLERANCE, require_prediction=False)))


def test_names_from_outside_are_escaped(make_run: RunMaker, samples: list[Sample]) -> None:
    """What the endpoint or the plan calls itself cannot become markup."""
    run = make_run(samples)
    run = replace(run, job=replace(run.job, model="<b>evil</b>"))
    html = page(run, conclude(run, TOLERANCE, require_prediction=False))

    assert "<b>evil</b>" not in html
    assert "&lt;b&gt;evil&lt;/b&gt;" in html


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=2000), st.floats(1e-3, 1e3))
def test_charts_draw_any_values(values: list[float], limit: float) -> None:
    """Whatever was measured, every coordinate is a finite number inside the drawing."""
    drawn = distribution(
        values, predicted_s={0.5: limit, 0.99: 2 * limit}, limit=(0.99, limit)
    ) + over_time(
        [(k / 10, v) for k, v in enumerate(values)],
        failed_s=[0.0],
        window=(0.0, 1.0),
        limit_s=limit,
        end_s=max(1.0, len(values) / 10),
    )
    numbers = re.findall(r'(?:points|cx|cy|x1|y1|x2|y2)="([^"]*)"', drawn)
    found = [float(n) for group in numbers for n in re.split(r"[ ,]", group)]

    assert all(-1e-6 <= n <= 520 for n in found)


@pytest.mark.parametrize(("high_s", "unit"), [(0.02, "ms"), (9.0, "ms"), (45.0, "seconds")])
def test_axes_are_in_the_unit_that_people_read(high_s: float, unit: str) -> None:
    """No axis of 45,000 ms."""
    drawn = distribution([0.01, high_s], predicted_s={}, limit=None)

    assert f">{unit}</text>" in drawn
    assert max(map(len, re.findall(r">(\d+)</text>", drawn))) <= 5


def test_legends_name_what_is_drawn(
    make_run: RunMaker, make_sample: SampleMaker, samples: list[Sample]
) -> None:
    """Each mark of a chart has its word, and a mark that is not there has none."""
    for run, failed in ((make_run(samples), 2), (make_run([make_sample(0)]), 0)):
        html = page(run, conclude(run, TOLERANCE, require_prediction=False))

        assert html.count("one that failed") == failed
        assert html.count("a request</span>") == 2
        assert html.count("SLO</span>") == 4


@given(st.floats(1e-6, 1e6))
def test_ticks_are_round_and_cover(high: float) -> None:
    """Ticks start at 0, reach the value, and are at most seven."""
    ticks = round_ticks(high)

    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-6)
    assert len(ticks) <= 7


def test_table_fits_a_narrow_terminal(make_run: RunMaker, samples: list[Sample]) -> None:
    """Under a pipe, 80 columns wide, the table is whole and free of colour codes."""
    out = StringIO()
    verdict = conclude(make_run(samples), TOLERANCE, require_prediction=False)
    print_verdict(verdict, Console(file=out, width=80))

    text = out.getvalue()
    assert "\x1b" not in text
    assert "…" not in text
    assert "SLO MET" in text
