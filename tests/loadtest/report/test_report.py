from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.report.charts import goodput_against_load, requests_over_time
from loadtest.report.run_page import run_page
from loadtest.report.table import print_verdict
from loadtest.run.folder import Run
from loadtest.verdict.prediction import TOLERANCE
from loadtest.verdict.verdict import conclude
from minicluster.pages.figure import ORANGE
from minicluster.pages.page import DataTable, Page, Section
from minicluster.pages.write import render
from minicluster.workload.samples import Sample
from tests.loadtest.made import make_run, make_sample


@pytest.fixture
def samples() -> list[Sample]:
    """Answer 3,200 requests, one failed."""
    made = [make_sample(k, k / 480, ttft_s=0.05 + k * 7919 % 4800 / 48000) for k in range(4800)]
    failed = replace(made[7], outcome="cut", chunk_s=(), detail="<script>")
    return [*made[:7], failed, *made[8:]]


def judged(run: Run) -> Page:
    return run_page(run, conclude(run, TOLERANCE, require_prediction=False))


def test_page_says_the_verdict(samples: list[Sample]) -> None:
    """Verdict, prediction and SLO stand in the page, the answer first."""
    page = judged(make_run(samples))
    html = render(page)

    assert (page.headline, page.status) == ("SLO MET", "met")
    assert "<h1>SLO MET</h1>" in html
    assert any("Prediction of the plan did not hold" in line for line in page.lines)
    assert "1 cut mid-stream" in html


def test_a_run_without_a_plan_has_no_empty_columns(samples: list[Sample]) -> None:
    """What a plan predicts stands in the table only where there is one."""
    run = make_run(samples)
    for heads, each in (
        (("", "predicted", "measured", "error", "SLO"), run),
        (("", "measured", "SLO"), replace(run, plan=None)),
    ):
        [table] = [
            block
            for part in judged(each).parts[:1]
            if isinstance(part, Section)
            for block in part.blocks
        ]
        assert isinstance(table, DataTable)
        assert table.heads == heads
        assert {len(row) for row in table.rows} == {len(heads)}


def test_charts_draw_what_was_measured(samples: list[Sample]) -> None:
    """Four charts: the values of the window by share, and every request at its arrival."""
    run = make_run(samples)
    page = judged(run)
    assert [figure.title for figure in page.figures] == [
        "TTFT: distribution",
        "TPOT: distribution",
        "TTFT over time",
        "TPOT over time",
    ]
    verdict = conclude(run, TOLERANCE, require_prediction=False)
    for metric in ("ttft", "tpot"):
        measured = page.figure(f"{metric.upper()}: distribution").trace("measured")
        spread = verdict.latency[metric]
        assert spread
        assert measured["y"][-1] == pytest.approx(1000 * spread.max_s, rel=1e-5)
        near_p90 = max(y for x, y in zip(measured["x"], measured["y"], strict=True) if x > 0.1)
        assert near_p90 == pytest.approx(1000 * spread.p90_s, rel=0.01)
        [promise] = [each for each in verdict.slo if each.metric == metric]
        corner = page.figure(f"{metric.upper()}: distribution").trace("SLO")
        assert corner["y"][0] == pytest.approx(1000 * promise.limit_s)
    over_time = page.figure("TTFT over time")
    drawn = over_time.trace("a request")
    latencies = {round(s.due_s, 3): s.ttft_s for s in samples if s.ok}
    assert len(drawn["x"]) == -(-len(latencies) // -(-len(latencies) // 1500))
    for due_s, value_ms in list(zip(drawn["x"], drawn["y"], strict=True))[::50]:
        assert value_ms == pytest.approx(1000 * latencies[round(due_s, 3)], rel=1e-4)
    failed = over_time.trace("a request that failed")
    assert failed["x"] == pytest.approx([samples[7].due_s], rel=1e-5)
    assert failed["text"] == ["cut mid-stream: &lt;script&gt;"]


@pytest.mark.parametrize("stop", ["complete", "died", "interrupted"])
def test_page_without_any_answer(samples: list[Sample], stop: str) -> None:
    """A run in which nothing was answered still has a page, without charts."""
    run = make_run([replace(s, outcome="refused", chunk_s=()) for s in samples], stop=stop)

    assert judged(run).figures == ()
    assert "</html>" in render(judged(run))


def test_names_from_outside_are_escaped(samples: list[Sample]) -> None:
    """What the endpoint or the plan calls itself cannot become markup."""
    run = make_run(samples)
    run = replace(run, job=replace(run.job, model="<b>evil</b>"))
    html = render(judged(run))

    assert "<b>evil</b>" not in html
    assert "&lt;b&gt;evil&lt;/b&gt;" in html
    assert html.count("<script") == 2 + 4  # Plotly's, ours, and the data of four charts


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=2000), st.floats(1e-3, 1e3))
def test_requests_lie_within_their_axes(values: list[float], limit: float) -> None:
    """Whatever was measured, all that is drawn lies inside the chart, in one unit."""
    end_s = max(1.0, len(values) / 10)
    drawn = requests_over_time(
        "TTFT over time",
        [(k / 10, v) for k, v in enumerate(values)],
        failed=[(0.5, "cut")],
        window_s=(0.0, 1.0),
        limit_s=limit,
        end_s=end_s,
    )
    top = drawn.layout["yaxis"]["range"][1]
    scale = 1 if drawn.layout["yaxis"]["title"]["text"] == "s" else 1000
    assert drawn.layout["xaxis"]["range"] == pytest.approx([0, end_s])
    assert drawn.trace("a request")["y"][0] == pytest.approx(scale * values[0], rel=1e-5)
    assert drawn.trace("SLO")["y"] == pytest.approx([scale * limit] * 2, rel=1e-5)
    for trace in drawn.traces:
        assert all(0 <= x <= end_s for x in trace["x"])
        assert all(0 <= y <= top for y in trace["y"])
    [before, after] = drawn.layout["shapes"]
    assert (before["x1"], after["x0"], after["x1"]) == (0.0, 1.0, end_s)


def test_legends_name_what_is_drawn() -> None:
    """A mark that is not there has no word in the legend."""
    names = [trace["name"] for trace in judged(make_run([make_sample(0)])).figures[2].traces]

    assert names == ["a request", "SLO"]


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


def test_table_fits_a_narrow_terminal(samples: list[Sample]) -> None:
    """Under a pipe, 80 columns wide, the table is whole and free of colour codes."""
    out = StringIO()
    verdict = conclude(make_run(samples), TOLERANCE, require_prediction=False)
    print_verdict(verdict, Console(file=out, width=80))

    text = out.getvalue()
    assert "\x1b" not in text
    assert "…" not in text
    assert "SLO MET" in text
