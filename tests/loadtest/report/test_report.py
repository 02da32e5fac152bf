"""What a run, a comparison, a search and a selftest look like: terminal, page and JUnit XML."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from rich.console import Console, RenderableType

from loadtest.report.charts import goodput_against_load
from loadtest.report.compare_page import comparison_table, search_table
from loadtest.report.junit import to_junit
from loadtest.report.run_page import run_page
from loadtest.run.folder import Run
from loadtest.studies.compare import compare_runs
from loadtest.verdict.verdict import Verdict
from minicluster.pages.figure import ORANGE
from minicluster.pages.page import Page
from minicluster.pages.write import render
from minicluster.workload.samples import Sample
from tests.loadtest.made import SEARCH, judge, judged, make_probe, make_run, make_sample

GOOD = [make_sample(k, k / 480) for k in range(4800)]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Answer 4,799 requests; one failed."""
    made = [make_sample(k, k / 480, ttft_s=0.05 + k * 7919 % 4800 / 48000) for k in range(4800)]
    failed = replace(made[7], outcome="cut", chunk_s=(), detail="<script>")
    return [*made[:7], failed, *made[8:]]


def page_of(run: Run) -> Page:
    return run_page(judge(run))


def shown(table: RenderableType) -> str:
    """Return *table* as under a pipe, 80 columns wide: whole, and free of colour codes."""
    out = StringIO()
    Console(file=out, width=80).print(table)
    return whole(out)


def whole(out: StringIO) -> str:
    text = out.getvalue()
    assert "…" not in text
    assert "\x1b" not in text
    return text


def test_page_says_the_verdict(samples: list[Sample]) -> None:
    """The answer stands first; what the endpoint calls itself cannot become markup."""
    run = make_run(samples)
    run = replace(run, job=replace(run.job, model="<b>evil</b>"))
    page = page_of(run)
    html = render(page)

    assert (page.headline, page.status) == ("SLO MET", "met")
    assert "<h1>SLO MET</h1>" in html
    assert any("Prediction of the plan did not hold" in line for line in page.lines)
    assert "1 cut mid-stream" in html
    assert "<b>evil</b>" not in html
    assert "&lt;b&gt;evil&lt;/b&gt;" in html
    assert html.count("<script") == 2 + 4  # Plotly's, ours, and the data of four charts


def test_charts_draw_what_was_measured(samples: list[Sample]) -> None:
    """Four charts: the values of the window by share, and every request at its arrival."""
    run = make_run(samples)
    page, verdict = page_of(run), judged(run)
    assert [figure.title for figure in page.figures] == [
        "TTFT: distribution",
        "TPOT: distribution",
        "TTFT over time",
        "TPOT over time",
    ]
    for metric in ("ttft", "tpot"):
        measured = page.figure(f"{metric.upper()}: distribution").trace("measured")
        spread = verdict.latency[metric]
        assert measured["x"][-1] == pytest.approx(1000 * spread.max_s, rel=1e-5)
        near_p90 = max(x for x, y in zip(measured["x"], measured["y"], strict=True) if y > 0.1)
        assert near_p90 == pytest.approx(1000 * spread.p90_s, rel=0.01)
        [promise] = [each for each in verdict.slo if each.metric == metric]
        corner = page.figure(f"{metric.upper()}: distribution").trace("SLO")
        assert corner["x"][0] == pytest.approx(1000 * promise.limit_s)
    over_time = page.figure("TTFT over time")
    [before, _] = over_time.layout["shapes"]
    assert (before["x0"], before["x1"]) == (0, verdict.window.start_s)
    drawn = over_time.trace("a request")
    latencies = {round(s.due_s, 3): s.ttft_s for s in samples if s.ok}
    assert len(drawn["x"]) == -(-len(latencies) // -(-len(latencies) // 1500))
    for due_s, value_ms in list(zip(drawn["x"], drawn["y"], strict=True))[::50]:
        assert value_ms == pytest.approx(1000 * latencies[round(due_s, 3)], rel=1e-4)
    failed = over_time.trace("a request that failed")
    assert failed["x"] == pytest.approx([samples[7].due_s], rel=1e-5)
    assert failed["text"] == ["cut mid-stream: &lt;script&gt;"]


def test_goodput_is_drawn_against_load() -> None:
    """Runs by what became of their SLO, limits upright, the diagonal for all that is offered."""
    drawn = goodput_against_load(
        [(8.0, 7.9, True), (12.0, 6.0, False)],
        {True: "holds", False: "misses", None: "open"},
        limits={"predicted limit": (10.0, ORANGE)},
        predicted=[(5.0, 5.0), (9.0, 8.5)],
    )
    assert (drawn.trace("holds")["x"], drawn.trace("holds")["y"]) == ([8.0], [7.9])
    assert (drawn.trace("misses")["x"], drawn.trace("misses")["y"]) == ([12.0], [6.0])
    assert drawn.trace("predicted limit")["x"] == [10.0, 10.0]
    assert drawn.trace("predicted")["y"] == [5.0, 8.5]
    assert drawn.trace("")["x"] == [8.0, 12.0]
    assert drawn.trace("all that is offered")["x"] == drawn.layout["xaxis"]["range"]
    with pytest.raises(KeyError):
        drawn.trace("open")


@pytest.mark.parametrize("slower", [1.0, 100.0])
def test_a_comparison_on_a_narrow_terminal(slower: float) -> None:
    """However far both are apart."""
    waits = np.random.default_rng(1).exponential(0.1, 300)
    first, second = (
        make_run(
            [
                make_sample(k, k / 30, ttft_s=by * wait, itl_s=0.02 * by)
                for k, wait in enumerate(waits.tolist())
            ]
        )
        for by in (1.0, slower)
    )
    text = shown(comparison_table(compare_runs(judge(first), judge(second), ("first", "second"))))

    assert max(map(len, text.splitlines())) <= 80


def test_the_tries_of_a_search_on_a_narrow_terminal() -> None:
    """Rates of thousands, latencies of minutes, and the percentile that they are."""
    missed = replace(
        make_probe(12345.67, holds=False), num_requests=123456, ttft_s=123.4, attained_fraction=1.0
    )
    probes = (missed, replace(missed, holds=None, ttft_s=None, tpot_s=None))
    text = shown(search_table(replace(SEARCH, percentile="p99", probes=probes)))

    for part in ("TTFT p99", "TPOT p99", "infinite", "123.4 s", "misses", "unclear"):
        assert part in text


def cases(verdict: Verdict, *, required: bool = False) -> dict[str, str]:
    """Return what became of each JUnit case."""
    suite = ET.fromstring(to_junit(verdict, require_prediction=required))  # noqa: S314
    found = {}
    for case in suite.findall("testcase"):
        marks = [child.tag for child in case if child.tag != "system-out"]
        found[str(case.get("name"))] = marks[0] if marks else "passed"
    for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert suite.get(count) == str(list(found.values()).count(kind))
    return found


def test_junit() -> None:
    """Kept limits pass, missed ones fail, what was not proven is an error."""
    slow = make_run([make_sample(k, k / 480, ttft_s=0.1 if k % 20 else 1.5) for k in range(4800)])
    other = judged(make_run([make_sample(k, k / 480, itl_s=0.04) for k in range(4800)]))
    unsettled = replace(judged(make_run(GOOD)), verdict="inconclusive", reasons=("not settled",))
    limit, valid, held = "TTFT p99 < 1000 ms", "the run is valid", "the prediction held"

    assert set(cases(judged(make_run(GOOD))).values()) == {"passed"}
    assert cases(judged(slow))[limit] == "failure"
    assert cases(judged(make_run(GOOD[:100])))[limit] == "error"
    assert cases(judged(make_run(GOOD, cpu_fraction=0.99)))[valid] == "error"
    assert cases(other)[held] == "skipped"
    assert cases(other, required=True)[held] == "failure"
    # A build is not green because every limit was kept in a run that proves nothing.
    assert cases(unsettled)[valid] == "error"
    assert "failure" not in cases(unsettled).values()
