"""Intervals on rows whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizing.evidence.errors import summarise
from sizing.evidence.evidence import leave_out, tried
from sizing.evidence.interval_fit import RowResidual, fit_intervals
from sizing.planner.intervals import DISTANCES, LEVELS, Labels

KNOWN = ("loaded dense", "vllm", "f1", "Hopper", "m1", "c1")


def residuals(
    spread: float, count: int = 400, bias: float = 0.0, kind: str = "loaded dense"
) -> list[RowResidual]:
    """Rows of forty configurations, errors normal in the logarithm."""
    draw = np.random.default_rng(7)
    return [
        RowResidual(
            quantity="tpot",
            predicted_s=0.02,
            log_ratio=float(draw.normal(bias, spread)),
            source="here",
            path=Labels(kind, "vllm", f"f{n % 2}", "Hopper", f"m{n % 4}", f"c{n % 40}"),
        )
        for n in range(count)
    ]


def nested(seed: int, families: int = 12) -> list[RowResidual]:
    """Rows whose family, model and configuration each have an error of their own."""
    draw = np.random.default_rng(seed)
    rows = []
    for family in range(families):
        of_family = draw.normal(0.0, 0.2)
        for model in range(2):
            of_model = of_family + draw.normal(0.0, 0.1)
            for configuration in range(3):
                own = of_model + draw.normal(0.0, 0.1)
                names = (f"m{family}-{model}", f"c{family}-{model}-{configuration}")
                path = Labels("loaded dense", "vllm", f"f{family}", "Hopper", *names)
                rows += [
                    RowResidual(
                        quantity="ttft",
                        predicted_s=1.0,
                        log_ratio=float(own + draw.normal(0.0, 0.05)),
                        source="here",
                        path=path,
                    )
                    for _ in range(4)
                ]
    return rows


@pytest.mark.parametrize(("spread", "bias"), [(0.05, 0.0), (0.4, 0.0), (0.1, 0.05)])
def test_intervals_cover_what_was_left_out(spread: float, bias: float) -> None:
    """80 % intervals made of some configurations hold about 80 % of the others."""
    found = tried(residuals(spread, bias=bias)).coverages[1]
    assert (found.source, found.quantity, found.rows) == ("here", "tpot", 400)
    assert 0.75 <= found.covered_fraction <= 0.88
    normal = math.exp(1.2816 * spread) - math.exp(-1.2816 * spread)
    assert found.median_width == pytest.approx(normal, rel=0.35)


def test_families_that_were_never_seen_are_covered() -> None:
    """Families, models and configurations err alike: 80 % of rows of other families are inside."""
    covered = [leave_out(nested(seed), "family")[0].covered_fraction for seed in range(3)]
    assert 0.72 <= np.mean(covered) <= 0.88


def test_intervals_get_wider_with_the_distance() -> None:
    """One prediction after the other has less in common with what was measured."""
    made = fit_intervals(nested(1))
    labels = ("f1", "Hopper", "m1-0", "c1-0-0")
    paths = [
        ("loaded dense", "vllm", *labels),
        ("loaded dense", "vllm", *labels[:3], ""),
        ("loaded dense", "vllm", *labels[:2], "new", ""),
        ("loaded dense", "vllm", "f1", "Ampere", "new", ""),
        ("loaded dense", "other", *labels),
        ("static", "vllm", *labels),
    ]
    found = [made.around(1.0, "ttft", path) for path in paths]
    assert [each.distance for each in found] == list(range(len(DISTANCES)))
    high, middle = ([made.bound("ttft", path, level) for path in paths] for level in (0.9, 0.5))
    widths = [math.log(each / centre) for each, centre in zip(high, middle, strict=True)]
    assert all(far >= near - 1e-9 for near, far in pairwise(widths))
    assert widths[-1] > 2 * widths[0]


def test_few_rows_of_another_kind_widen_no_distance_beyond_them() -> None:
    """Models of one dense family err by a factor of 7; of MoE families one model each is known."""
    experts = [replace(each, path=each.path._replace(kind="loaded MoE")) for each in nested(4)]
    experts = [each for each in experts if each.path.shape.endswith("-0")]
    dense = [
        replace(each, log_ratio=2.0 * (-1) ** (each.path.shape.endswith("-0")))
        for each in nested(5, families=1)
    ]
    alone, beside = (
        fit_intervals(rows).spreads["ttft", "loaded MoE", 4] for rows in (experts, experts + dense)
    )
    assert beside.logs == pytest.approx(alone.logs, rel=0.25)


def test_no_order_of_the_rows_changes_an_interval() -> None:
    """Equal rows give equal figures."""
    rows = nested(2, families=6)
    assert fit_intervals(rows) == fit_intervals(rows[::-1])


def test_a_configuration_takes_on_its_error() -> None:
    """All rows of one configuration are 50 % above their prediction: so is its interval."""
    odd = [
        replace(each, log_ratio=0.4) if each.path.configuration == "c1" else each
        for each in residuals(0.05)
    ]
    made = fit_intervals(odd)
    own, other = (made.around(1.0, "tpot", (*KNOWN[:5], name)) for name in ("c1", "c5"))
    assert own.high_s > 1.4 > other.high_s


@pytest.mark.parametrize(("spread", "bias"), [(0.05, 0.0), (0.4, 0.2), (0.1, 0.3)])
def test_claims_are_right_as_often_as_they_say(spread: float, bias: float) -> None:
    """Bounds made of some configurations hold for the named share of the others, biased or not."""
    for claim in tried(residuals(spread, bias=bias)).claims:
        assert claim.bound_fraction == pytest.approx(claim.confidence, abs=0.07)
        assert claim.right_fraction >= claim.bound_fraction


def test_predictions_that_were_too_high_earn_no_credit() -> None:
    """Rows half as slow as predicted move the lower end; the upper one keeps its distance."""
    fast, exact = (fit_intervals(residuals(0.1, bias=bias)) for bias in (-0.7, 0.0))
    low, high = (made.around(1.0, "tpot", KNOWN) for made in (fast, exact))
    assert low.low_s < 0.6 * high.low_s
    assert low.high_s == pytest.approx(high.high_s, abs=0.05)
    assert low.high_s > 1.1
    assert fast.bound("tpot", KNOWN, 0.9) == low.high_s


@settings(max_examples=8, deadline=None)
@given(spread=st.floats(0.01, 1.0), bias=st.floats(-0.5, 0.5), level=st.floats(0.5, 0.97))
def test_bounds_rise_with_confidence(spread: float, bias: float, level: float) -> None:
    """More confidence never means a lower bound, between the levels that are kept and beyond."""
    made = fit_intervals(residuals(spread, count=80, bias=bias))
    low, high = (made.bound("tpot", KNOWN, each) for each in (level, level + 0.02))
    assert low <= high
    assert all(len(each.logs) == len(LEVELS) for each in made.spreads.values())


def test_intervals_back_off_to_what_is_known() -> None:
    """A model that was never measured gets the interval of its family; another quantity none."""
    made = fit_intervals(residuals(0.1))
    own, other = (made.around(2.0, "tpot", (*KNOWN[:4], model, "")) for model in ("m1", "new"))
    assert own.group == "tpot/loaded dense/vllm/f1/Hopper/m1"
    assert other.group == "tpot/loaded dense/vllm/f1/Hopper"
    assert own.low_s < 2.0 < own.high_s
    assert made.around(2.0, "ttft", KNOWN) is None
    # Rows predicted with their own constants say too little of one that is not.
    stand_in = made.around(2.0, "tpot", (*KNOWN[:4], "new", ""), stand_in=True)
    assert 1.02 * other.high_s < stand_in.high_s < 1.1 * other.high_s
    assert other.low_s / 1.1 < stand_in.low_s < other.low_s / 1.02


def test_errors_are_relative_to_the_measurement() -> None:
    """Predicted 2 for a measured 1 is 100 % off, predicted 0.5 is 50 %."""
    found = summarise([math.log(0.5), math.log(2)])
    assert (found.mean, found.median, found.bias) == pytest.approx((0.75, 0.75, 0.25))
    assert summarise([]) is None
