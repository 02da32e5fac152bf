"""The rail-only study: its page, and what holds whatever its conventions are.

The paper's own numbers are claims of the seed documents: tests/sizing/cli/test_seeds.py.
"""

from __future__ import annotations

import json
from html import unescape
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from sizing import catalog
from sizing.network.rail_only_study import study
from sizing.report.rail_only import short, study_page

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sizing.conftest import Sizing

PAPER = catalog.find_study("rail-only")


def test_wider_domains_and_larger_batches_never_hurt() -> None:
    """The step shortens with K; the distance from the ideal network with the batch."""
    found = study(PAPER)
    for sweep in found.hb_sweeps:
        assert all(b.total_s <= a.total_s for a, b in pairwise(sweep.points))
        assert all(gain >= 0 for gain in sweep.gains)
    for sweep in found.batch_sweeps:
        near = [point.relative_performance for point in sweep.points]
        assert near == sorted(near)
        assert max(near) <= 1


def test_a_study_leaves_out_what_does_not_divide() -> None:
    """HB sizes and bills are of whole domains only; a warning names its model."""
    found = study(catalog.find_study("rail-only", ["gpus=[384]", "hb_sizes=[64,256]"]))
    assert [point.step.hb_size for point in found.hb_sweeps[0].points] == [64]
    assert (found.batch_sweeps, found.shares, found.savings) == ((), (), ())
    assert [text.partition(":")[0] for text in found.warnings[1:]] == ["gpt-3"]


def test_page_of_the_study(sizing: Sizing, tmp_path: Path) -> None:
    target = tmp_path / "study.html"
    done = sizing("fabric", "rail-only", "--html", str(target), "--json")
    assert done.code == 0
    html = target.read_text(encoding="utf-8")
    for warning in json.loads(done.out)["warnings"]:
        assert warning in unescape(html)
    page = study_page(study(PAPER))
    lines = [trace for figure in page.figures for trace in figure.traces if "mode" in trace]
    assert len(lines) == 3 * 3 * len(PAPER.gpus)
    assert html.count('class="chart"') == len(page.figures)


def test_charts_draw_the_study() -> None:
    found = study(PAPER)
    page = study_page(found)
    for sweep in found.hb_sweeps:
        size = short(sweep.gpus)
        times = page.figure(f"Iteration time, {size} GPUs").trace(sweep.model)
        assert times["x"] == [point.step.hb_size for point in sweep.points]
        assert times["y"] == pytest.approx([point.total_s for point in sweep.points], rel=1e-5)
        near = page.figure(f"Of an ideal any-to-any network, {size} GPUs").trace(sweep.model)
        shares = [100 * point.relative_performance for point in sweep.points]
        assert near["y"] == pytest.approx(shares, rel=1e-5)
    for sweep in found.batch_sweeps:
        drawn = page.figure(f"Larger batches need less network, {short(sweep.gpus)} GPUs")
        trace = drawn.trace(f"{sweep.model}, HB {sweep.points[0].step.hb_size}")
        own = PAPER.model(sweep.model).tokens_per_batch
        factors = [point.tokens_per_batch / own for point in sweep.points]
        assert trace["x"] == pytest.approx(factors, rel=1e-5)
    for saving in found.savings:
        costs = page.figure(f"Cost at 2:1, {short(saving.gpus)} GPUs")
        at = costs.trace("Clos")["x"].index(f"radix {saving.radix}")
        for name, bill in (("Clos", saving.clos), ("rail-only", saving.rail_only)):
            drawn_cost = 1000 * costs.trace(name)["y"][at]
            assert drawn_cost == pytest.approx(bill.relative_cost, rel=1e-5)


@pytest.mark.parametrize(
    "override", ["hb_sizes=[0]", "flops_per_s=-1.0", "nosuch=1", "gpus=[16384]=2"]
)
def test_studies_that_cannot_be(sizing: Sizing, override: str) -> None:
    done = sizing("fabric", "rail-only", "--set", override)
    assert done.code == 2
    assert override.partition("=")[0] in done.err
