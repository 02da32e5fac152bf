"""Intervals and scalars on rows whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizing.evidence.evidence import CONFIDENCES, tried
from sizing.evidence.interval import LEVELS, RowResidual, fit_intervals
from sizing.evidence.prediction import RowPrediction
from sizing.evidence.row import MeasuredRow
from sizing.evidence.scalar import corrected, fit_scalars, in_fitted_half
from sizing.evidence.validate import RowVerdict, summarise
from tests.sizing.evidence.rows import row


def residuals(spread: float, count: int = 400, bias: float = 0.0) -> list[RowResidual]:
    """Rows of forty configurations, errors normal in the logarithm."""
    draw = np.random.default_rng(7)
    return [
        RowResidual(
            quantity="tpot",
            predicted_s=0.02,
            log_ratio=float(draw.normal(bias, spread)),
            source="here",
            configuration=f"c{number % 40}",
            path=("loaded", "vllm", "closed", "dense", f"m{number % 3}"),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(("spread", "bias"), [(0.05, 0.0), (0.4, 0.0), (0.1, 0.05)])
def test_intervals_cover_what_was_left_out(spread: float, bias: float) -> None:
    """80 % intervals made of some configurations hold about 80 % of the others."""
    found = tried(residuals(spread, bias=bias)).coverages[1]
    assert (found.source, found.quantity, found.rows) == ("here", "tpot", 400)
    assert 0.75 <= found.covered_fraction <= 0.85
    normal = math.exp(1.2816 * spread) - math.exp(-1.2816 * spread)
    assert found.median_width == pytest.approx(normal, rel=0.35)


@pytest.mark.parametrize(("spread", "bias"), [(0.05, 0.0), (0.4, 0.2), (0.1, -0.3)])
def test_claims_are_right_as_often_as_they_say(spread: float, bias: float) -> None:
    """Bounds made of some configurations hold for the named share of the others, biased or not."""
    for claim in tried(residuals(spread, bias=bias)).claims:
        assert claim.bound_fraction == pytest.approx(claim.confidence, abs=0.05)
        assert claim.right_fraction >= claim.bound_fraction


def test_a_claim_is_tried_at_the_lowest_limit_above_its_bound() -> None:
    """Errors far smaller than the 10 % between limits: nearly every claim is right."""
    found = [each for each in tried(residuals(0.002)).claims if each.source == "all"]
    assert [each.confidence for each in found] == list(CONFIDENCES)
    assert all(each.right_fraction > each.bound_fraction for each in found[:2])


@settings(max_examples=50, deadline=None)
@given(spread=st.floats(0.01, 1.0), bias=st.floats(-0.5, 0.5), level=st.floats(0.02, 0.97))
def test_bounds_rise_with_confidence(spread: float, bias: float, level: float) -> None:
    """More confidence never means a lower bound, between the levels that are kept and beyond."""
    made = fit_intervals(residuals(spread, count=80, bias=bias))
    path = ("loaded", "vllm", "closed", "dense", "m1")
    low, high = (made.bound("tpot", path, each) for each in (level, level + 0.02))
    assert low <= high
    assert len(made.cells["tpot"].logs) == len(LEVELS)


def test_few_rows_are_stretched_as_the_other_loads_are() -> None:
    """Six rows of a new kind of load cannot say how far quantiles miss: their parent does."""
    few = [
        replace(each, path=(*each.path[:2], "open", *each.path[3:]), log_ratio=0.0)
        for each in residuals(0.1, count=6)
    ]
    made = fit_intervals([*residuals(0.1), *few])
    around = made.around(1.0, "tpot", ("loaded", "vllm", "open", "dense", "m1"))
    assert around.rows == 2
    assert around.high_s > 1.05
    assert around.low_s < 0.95


def test_few_configurations_say_less_than_their_rows() -> None:
    """Loads of one configuration err alike: what was left out lies further apart than the rows."""
    rows = [
        replace(each, configuration=f"c{k % 6}", log_ratio=0.1 * (k % 6 - 2.5))
        for k, each in enumerate(residuals(0.1, count=120))
    ]
    around = fit_intervals(rows).around(1.0, "tpot", ("loaded", "vllm"))
    assert math.log(around.high_s / around.low_s) > 0.6


def test_intervals_back_off_to_what_is_known() -> None:
    """A model that was never measured gets the interval of its engine; another quantity none."""
    made = fit_intervals(residuals(0.1))
    own = made.around(2.0, "tpot", ("loaded", "vllm", "closed", "dense", "m1"))
    other = made.around(2.0, "tpot", ("loaded", "vllm", "closed", "dense", "new"))
    assert (own.group, other.group) == (
        "tpot/loaded/vllm/closed/dense/m1",
        "tpot/loaded/vllm/closed/dense",
    )
    assert own.low_s < 2.0 < own.high_s
    assert made.around(2.0, "ttft", ("loaded",)) is None
    # Rows predicted with their own constants say too little of one that is not.
    stand_in = made.around(2.0, "tpot", ("loaded", "vllm", "closed", "dense"), stand_in=True)
    assert 1.15 * other.high_s < stand_in.high_s < 1.3 * other.high_s
    assert other.low_s / 1.3 < stand_in.low_s < other.low_s / 1.15


def static(gpu: str, tp: int, model: str, batch: int) -> MeasuredRow:
    """Return a static row; measurements are put in by the caller."""
    load = {"load": "static", "batch_size": str(batch), "isl": "128", "osl": "128"}
    return row(gpu=gpu, model=model, engine="trtllm", gpus=str(tp), tp=str(tp), **load)


def verdict(
    each: MeasuredRow, ttft_s: float, tpot_s: float, *, truth: tuple[float, float]
) -> RowVerdict:
    """Return a prediction that is off by what the scalars should find."""
    measured = replace(each, ttft_s=ttft_s * truth[0], tpot_s=tpot_s * truth[1] + 32 * 1e-5)
    found = RowPrediction(status="predicted", ttft_s=ttft_s, tpot_s=tpot_s, num_layers=32)
    return RowVerdict(id=each.id, source="here", row=measured, found=found)


def test_scalars_find_what_is_off_per_group() -> None:
    """H100 prefill 20 % slower than predicted, H200's 10 % faster, 10 us a layer on both."""
    rows = [
        verdict(static(gpu, 1, f"m{m}", n), 0.01 * n, 0.005 * (1 + n / 64), truth=(truth, 1.1))
        for gpu, truth in (("h100-sxm", 1.2), ("h200-sxm", 0.9))
        for m in range(60)
        for n in (1, 8, 64, 256)
    ]
    scalars = fit_scalars(v for v in rows if v.row is not None and in_fitted_half(v.row))
    judged = [v for v in rows if v.row is not None and not in_fitted_half(v.row)]
    assert 160 < len(judged) < 320
    for each in judged:
        fixed = corrected(each, scalars)
        assert fixed.found.ttft_s == pytest.approx(each.row.ttft_s, rel=0.05)
        assert fixed.found.tpot_s == pytest.approx(each.row.tpot_s, rel=0.05)
    # TP 8 was not measured: it is corrected as its GPU and precision are.
    new = verdict(static("h100-sxm", 8, "m1", 8), 0.1, 0.01, truth=(1.2, 1.1))
    assert corrected(new, scalars).found.ttft_s == pytest.approx(0.12, rel=0.03)


def test_halves_are_the_same_everywhere() -> None:
    """A configuration's half follows from its name alone: all its loads with it."""
    rows = [[static("h100-sxm", 2, model, n) for n in (1, 2, 4, 1536)] for model in "abcdef"]
    halves = [{in_fitted_half(each) for each in loads} for loads in rows]
    assert halves == [{False}, {True}, {True}, {False}, {False}, {False}]


def test_errors_are_relative_to_the_measurement() -> None:
    """Predicted 2 for a measured 1 is 100 % off, predicted 0.5 is 50 %."""
    found = summarise([math.log(0.5), math.log(2)])
    assert (found.mean, found.median, found.bias) == pytest.approx((0.75, 0.75, 0.25))
    assert summarise([]) is None
