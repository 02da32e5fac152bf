"""The rail-only study: the paper's numbers from our model."""

from __future__ import annotations

import json
from html import unescape
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from minicluster.errors import InputError
from sizing import catalog
from sizing.cli.app import app
from sizing.network.rail_only import (
    gains,
    iteration,
    optimal_model_parallel,
    relative_performance,
    with_batch,
)
from sizing.network.rail_only_study import savings_range, study
from sizing.report.rail_only import short, study_page

if TYPE_CHECKING:
    from pathlib import Path

PAPER = catalog.find_study("rail-only")


def run(*arguments: str) -> tuple[int, str]:
    """Run `sizing fabric`; return exit code of refusals and what it printed."""
    result = CliRunner().invoke(app, ["fabric", *arguments])
    if isinstance(result.exception, InputError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("model", "sizes", "percent"),
    [
        ("gpt-3", (32, 64), 12.0),
        ("gpt-3", (512, 1024), 0.95),
        ("opt-175b", (32, 64), 37.0),
        ("opt-175b", (512, 1024), 7.5),
    ],
)
def test_gains_of_wider_domains(model: str, sizes: tuple[int, int], percent: float) -> None:
    """The paper's printed gains at 16,384 GPUs within 0.2 points."""
    (gain,) = gains(PAPER.model(model), PAPER, gpus=16_384, hb_sizes=sizes)
    assert 100 * gain == pytest.approx(percent, abs=0.2)


def test_the_papers_other_numbers() -> None:
    """Optimal sizes, pairs, bytes and distances from the ideal network."""
    models = {model.name: model for model in PAPER.models}
    assert optimal_model_parallel(models["gpt-3"], 16_384) == pytest.approx(4.36, rel=0.01)
    assert optimal_model_parallel(models["opt-175b"], 16_384) == pytest.approx(17.2, rel=0.01)
    at = [share for share in study(PAPER).shares if share.gpus == 32_768]
    for share, silent, inside in zip(at, (99.5, 99.5, 99.5), (98.7, 95.4, 91.8), strict=True):
        assert 100 * share.traffic.silent_pairs_fraction == pytest.approx(silent, abs=0.3)
        assert share.traffic.hb_pairs_fraction <= 0.0025
        assert 100 * share.traffic.hb_bytes_fraction == pytest.approx(inside, abs=0.1)
    best = relative_performance(models["gpt-3"], PAPER, gpus=32_768, hb_size=256)
    assert 1 / best == pytest.approx(1.07, rel=0.02)
    palm = models["palm-540b"]
    slow = relative_performance(palm, PAPER, gpus=32_768, hb_size=256)
    assert 1 / slow == pytest.approx(2.0, rel=0.08)
    big = relative_performance(with_batch(palm, 2048 * 2048), PAPER, gpus=32_768, hb_size=256)
    assert 100 * slow == pytest.approx(53, abs=3.5)
    assert 100 * big == pytest.approx(74, abs=3.5)


def test_savings_of_the_study() -> None:
    """37.5 to 75 % at 2:1 for the paper's two sizes; a third of the links at radix 64."""
    found = [saving for saving in study(PAPER).savings if saving.gpus > 16_384]
    assert savings_range(tuple(found)) == pytest.approx((0.375, 0.75))
    narrow = next(saving for saving in found if saving.radix == 64)
    assert narrow.links_saved_fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize("model", [model.name for model in PAPER.models])
def test_wider_domains_and_larger_batches_never_hurt(model: str) -> None:
    """The step shortens with K; the distance from the ideal network with the batch."""
    taken = PAPER.model(model)
    steps = [iteration(taken, PAPER, gpus=16_384, hb_size=size).total_s for size in PAPER.hb_sizes]
    assert all(after <= before for before, after in pairwise(steps))
    near = [
        relative_performance(
            with_batch(taken, factor * taken.tokens_per_batch), PAPER, gpus=16_384, hb_size=256
        )
        for factor in (1, 2, 4, 8)
    ]
    assert all(after >= before for before, after in pairwise(near))
    assert max(near) <= 1


def test_page_of_the_study(tmp_path: Path) -> None:
    """The command writes one page, with every model's line in every sweep."""
    target = tmp_path / "study.html"
    code, out = run("rail-only", "--html", str(target), "--json")
    assert code == 0
    html = target.read_text(encoding="utf-8")
    for warning in json.loads(out)["warnings"]:
        assert warning in unescape(html)
    page = study_page(study(PAPER))
    lines = [trace for figure in page.figures for trace in figure.traces if "mode" in trace]
    assert len(lines) == 3 * 3 * len(PAPER.gpus)
    assert html.count('class="chart"') == len(page.figures)


def test_charts_draw_the_study() -> None:
    """Times, distances, batches, traffic and costs are those of the study."""
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
def test_studies_that_cannot_be(override: str) -> None:
    """Wrong conventions are refused by name."""
    code, out = run("rail-only", "--set", override)
    assert code == 2
    assert override.partition("=")[0] in out
