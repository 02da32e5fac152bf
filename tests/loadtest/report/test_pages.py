"""The pages as a browser shows them: headless Chromium, rendered text, plots, no complaint."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from loadtest.report.compare_page import comparison_page, search_page
from loadtest.report.run_page import run_page
from loadtest.run.folder import Run
from loadtest.studies.compare import compare_runs
from loadtest.verdict.resimulation import PredictedRequest, Resimulation
from minicluster.pages.figure import BLUE, Figure, axes, axis, marks
from minicluster.pages.page import ChartRow, Page
from minicluster.pages.write import render, write_page
from tests.browser import opened
from tests.loadtest.made import SEARCH, judge, make_probe, make_run, make_sample

pytestmark = pytest.mark.browser

SEEN = """(() => {
const charts = [...document.querySelectorAll('.chart')].map(chart => {
  const plot = chart.querySelector('.cartesianlayer');
  const drawn = [...plot.querySelectorAll('.point,.js-line')].filter(e => {
    const box = e.getBoundingClientRect();
    const style = getComputedStyle(e);
    return box.width + box.height > 0 && (style.stroke !== 'none' || style.fill !== 'none');
  });
  const named = chart.data.findIndex(trace => trace.name === 'a request' || trace.x.length > 3);
  Plotly.Fx.hover(chart, [{curveNumber: Math.max(0, named), pointNumber: 1}]);
  const box = chart.getBoundingClientRect();
  return {drawn: box.width > 100 && box.height > 100 ? drawn.length : 0,
    texts: [...chart.querySelectorAll('svg text')].map(e => e.textContent),
    hovered: chart.querySelector('.hoverlayer').textContent,
    cut: [...chart.querySelectorAll('.xtitle,.ytitle,.xtick,.ytick,.legendtext')].filter(e => {
      const mine = e.getBoundingClientRect();
      return mine.left < box.left - 1 || mine.right > box.right + 1 ||
        mine.top < box.top - 1 || mine.bottom > box.bottom + 1;
    }).map(e => e.textContent)};
});
return {text: document.body.innerText, charts: charts,
  loaded: [...document.querySelectorAll('script[src],link,img,iframe,image')].map(
    e => e.getAttribute('src') || e.getAttribute('href'))};
})()"""
"""The text that a page shows."""


def look(page: Page, place: Path) -> dict[str, Any]:
    """Open *page*, and return what a reader sees."""
    file = place / "page.html"
    write_page(file, page)
    with opened(file.as_uri(), Path(mkdtemp(dir=place))) as tab:
        tab.resize(1100)
        tab.wait_for("document.readyState === 'complete'")
        tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        tab.wait_for("[...document.querySelectorAll('.chart')].every(each => each.data)")
        seen: dict[str, Any] = tab.evaluate(SEEN)
        assert tab.console == []
        assert [url for url in tab.requested if url.startswith("http")] == []
        for width in (390, 1280):
            tab.resize(width)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    assert seen["loaded"] == []
    assert len(seen["charts"]) == len(page.figures)
    for chart, figure in zip(seen["charts"], page.figures, strict=True):
        assert chart["drawn"], figure.title
        assert chart["cut"] == [], figure.title
        shown = {trace["name"] for trace in figure.traces if trace.get("showlegend", True)}
        assert {unescape(name) for name in shown} <= set(chart["texts"]), figure.title
        for side in ("xaxis", "yaxis"):
            assert figure.layout[side]["title"]["text"] in chart["texts"]
    return seen


@pytest.fixture
def run() -> Run:
    """Answer 3,200 requests, one of which failed."""
    made = [make_sample(k, k / 480, ttft_s=0.05 + k * 7919 % 4800 / 48000) for k in range(4800)]
    made[7] = make_sample(
        7, 7 / 320, ttft_s=None, outcome="cut", detail="<script>alert(1)</script>"
    )
    return make_run(made)


def test_report(run: Run, tmp_path: Path) -> None:
    """Verdict, phases, errors and plan are there to read; five plots have something in them."""
    foretold = PredictedRequest(
        ttft_s=0.1,
        tpot_s=0.02,
        e2e_s=0.28,
        longest_stall_s=0.02,
        phases_s={"ingress": 0.01, "prefill_queue": 0.04, "prefill": 0.05},
    )
    resimulation = Resimulation(
        requests=dict.fromkeys(range(4800), foretold),
        itl={"mean": 0.02, "p50": 0.02, "p90": 0.02, "p95": 0.02, "p99": 0.02},
        busy_fraction={"prefill": 0.4, "decode": 0.5},
    )
    found = judge(run, resimulation=resimulation)
    seen = look(run_page(found), tmp_path)
    text, charts = seen["text"], seen["charts"]

    assert text.startswith("SLO MET")
    for part in ("Predicted, measured, SLO", "Phase by phase", "Errors", "The plan"):
        assert part in text
    assert "<script>alert(1)</script>" in text
    assert "explains" in text
    assert len(charts) == 5
    assert "Goodput against load" in text
    assert "60.00 requests/s, up to which the plan predicts" in text
    assert re.search(r"[0-9.]+ % within [0-9.]+ ms", charts[0]["hovered"])
    assert re.search(r"arrival [0-9.]+ s: [0-9.]+ ms", charts[2]["hovered"])


def test_words_of_a_chart_are_no_markup(tmp_path: Path) -> None:
    """What a user named is written in the legend as it stands, tags and all."""
    name = "<b>bold</b> <a href='javascript:alert(1)'>x</a> &amp; $x$"
    drawn = marks(name, [1, 2], [3, 4], colour=BLUE, hover="%{text}", texts=[name, name])
    figure = Figure(
        title=name, caption=name, traces=(drawn, {**drawn, "name": "other"}),
        layout=axes(axis("x", 0, 3), axis("y", 0, 5)),
    )  # fmt: skip
    page = Page(title=name, headline=name, parts=(ChartRow((figure,)),))
    seen = look(page, tmp_path)

    assert seen["text"].startswith(name)
    assert name in seen["charts"][0]["hovered"]


@pytest.mark.parametrize(
    ("as_written", "broken", "says"),
    [
        ("<head>", "<head><script>delete window.DecompressionStream</script>",
         ["needs a browser of 2023 or later"] * 2),
        ('id="plotly">', 'id="plotly">QUJD', ["TypeError"] * 2),
        ('{"data": [', "[", ["SyntaxError", ""]),
    ],
)  # fmt: skip
def test_a_chart_that_is_not_drawn_says_why(
    as_written: str, broken: str, says: list[str], tmp_path: Path
) -> None:
    """An old browser, a script or a chart that is damaged; other charts are drawn."""
    drawn = marks("a", [1, 2], [3, 4], colour=BLUE, hover="%{x}", texts=["b", "c"])
    chart = Figure(title="a", caption="a", traces=(drawn,), layout=axes(axis("x"), axis("y")))
    html = render(Page(title="a", headline="a", parts=(ChartRow((chart, chart)),)))
    file = tmp_path / "page.html"
    file.write_text(html.replace(as_written, broken, 1), encoding="utf-8")
    with opened(file.as_uri(), Path(mkdtemp(dir=tmp_path))) as tab:
        charts = "[...document.querySelectorAll('.chart')]"
        tab.wait_for(f"{charts}.length === 2 && {charts}.every(each => each.textContent)")
        told = [
            tab.evaluate(f"{charts}[{at}].matches('.missing') ? {charts}[{at}].textContent : ''")
            for at in range(2)
        ]
    for text, reason in zip(told, says, strict=True):
        assert reason in text
        assert bool(text) == bool(reason)


def test_search_and_comparison(run: Run, tmp_path: Path) -> None:
    """Tries and limits are drawn and said; of two runs what differs, and no name is too wide."""
    comparison = compare_runs(judge(run), judge(run), ("before", "after" * 50))
    both = look(comparison_page(comparison, judge(run), judge(run)), tmp_path)
    rates = ((8.0, True), (10.0, True), (12.5, False), (11.2, True), (11.8, None))
    probes = tuple(make_probe(rate, holds=holds) for rate, holds in rates)
    search = replace(SEARCH, percentile="p90", predicted_requests_per_s=12.0, probes=probes)
    seen = look(search_page(search), tmp_path)

    [chart], text = seen["charts"], seen["text"]

    assert text.startswith("The SLO holds at 11.20 requests/s and misses at 12.50")
    assert "-4% to +7% off the measured limit" in text
    assert "Unclear at 11.80 requests/s" in text
    assert "TTFT p90" in text
    for part in ("holds", "misses", "unclear", "predicted limit", "all that is offered"):
        assert part in chart["texts"]
    assert chart["drawn"] == 4 + 5  # diagonal, course, two limits; a mark a try
    assert both["text"].startswith("0 of 16 figures differ")
    assert "Compared request by request" in both["text"]
    assert [chart["drawn"] for chart in both["charts"]] == [2, 2]
