"""Intervals on rows whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizing.evidence.errors import summarise
from sizing.evidence.evidence import leave_out, tried
from sizing.evidence.interval_fit import RowResidual, fit_intervals
from sizing.planner.intervals import LEVELS, Labels

KNOWN = Labels("loaded dense", "plain", "vllm", "0.1", "f1", "Hopper", "h100", "c1")


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
            labels=KNOWN._replace(kind=kind, family=f"f{n % 2}", configuration=f"c{n % 40}"),
        )
        for n in range(count)
    ]


def nested(
    seed: int, families: int = 12, of_families: float = 0.2, engines: int = 1, of_engines: float = 0
) -> list[RowResidual]:
    """Rows whose family, engine and configuration each have an error of their own."""
    draw = np.random.default_rng(seed)
    by_engine = draw.normal(0.0, of_engines, engines)
    rows = []
    for family, engine in product(range(families), range(engines)):
        if not engine:
            by_family = draw.normal(0.0, of_families)
        for configuration in range(6):
            own = by_family + by_engine[engine] + draw.normal(0.0, 0.1)
            labels = KNOWN._replace(
                engine="vllm" if not engine else f"e{engine}",
                family=f"f{family}",
                configuration=f"c{family}-{engine}-{configuration}",
            )
            rows += [
                RowResidual(
                    quantity="ttft",
                    predicted_s=1.0,
                    log_ratio=float(own + draw.normal(0.0, 0.05)),
                    source="here",
                    labels=labels,
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
    """Families and configurations err alike: 80 % of rows of other families are inside."""
    covered = [leave_out(nested(seed), "family")[0].covered_fraction for seed in range(3)]
    assert 0.72 <= np.mean(covered) <= 0.9


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_few_families_say_little_of_the_next(kept: int) -> None:
    """
    Intervals learned from one, two or three of a kind's families hold 80 % of the others.

    Other kinds of load say how far families lie apart; without any, one family cannot know.
    """
    inside = []
    for seed in range(10):
        known = [
            replace(each, labels=each.labels._replace(kind=kind))
            for at, kind in enumerate(("loaded MoE", "static dense"))
            for each in nested(100 * seed + at, families=5)
        ]
        own = nested(100 * seed + 7, families=kept + 8)
        rest = {f"f{family}" for family in range(kept, kept + 8)}
        made = fit_intervals([*known, *(each for each in own if each.labels.family not in rest)])
        for each in own:
            if each.labels.family in rest:
                found = made.around(1.0, "ttft", each.labels._replace(configuration=""))
                assert found is not None
                inside.append(found.low_s <= math.exp(each.log_ratio) <= found.high_s)
    assert 0.7 <= np.mean(inside) <= 0.93


def test_a_variance_is_that_of_the_groups() -> None:
    """Families lie 0.3 apart, engines 0.1, configurations 0.1, rows 0.05, before the scale."""
    found = fit_intervals(nested(3, families=20, of_families=0.3, engines=2, of_engines=0.1))
    own = next(each for each in found.variances if each.kind == KNOWN.kind)
    by_level = dict(zip(LEVELS, own.levels, strict=True))
    family, rows = by_level["family",] ** 0.5, own.rows**0.5
    assert family / rows == pytest.approx(0.3 / 0.05, rel=0.35)
    assert by_level["configuration",] ** 0.5 / rows == pytest.approx(0.1 / 0.05, rel=0.35)
    assert by_level["gpu",] ** 0.5 < family / 3  # there is one


def test_intervals_get_wider_with_what_was_not_measured() -> None:
    """One prediction after the other has less in common with what was measured."""
    made = fit_intervals(nested(1))
    changes: list[dict[str, str]] = [
        {"configuration": "c1-0-0"},
        {"configuration": ""},
        {"version": "0.2"},
        {"generation": "Ampere", "gpu": "a100"},
        {"family": "new"},
        {"engine": "other"},
        {"kind": "static dense"},
    ]
    labels, widths, found = KNOWN, [], []
    for change in changes:
        labels = labels._replace(**change)
        found.append(made.around(1.0, "ttft", labels))
        high, middle = (made.bound("ttft", labels, level) for level in (0.95, 0.5))
        widths.append(math.log(high / middle))
    assert widths == sorted(widths)
    assert [each.distance for each in found] == [0, 1, 1, 2, 3, 3, 4]
    assert [each.unmeasured for each in found[:5]] == [
        (),
        (),
        ("vllm 0.2",),
        ("vllm 0.2", "a100"),
        ("vllm 0.2", "new", "a100"),
    ]


def test_a_group_weighs_what_its_rows_say() -> None:
    """A family is believed the more, the more configurations of it agree."""
    few = [each for each in nested(5) if each.labels.configuration != "c1-0-0"]
    high = [replace(each, log_ratio=0.5) for each in few if each.labels.family == "f1"]
    others = [each for each in few if each.labels.family != "f1"]
    one, more = (
        fit_intervals([*others, *(each for each in high if each.labels.configuration in names)])
        for names in ({"c1-0-1"}, {f"c1-0-{n}" for n in range(1, 6)})
    )
    little, much = (made.bound("ttft", KNOWN, 0.5) for made in (one, more))
    assert little is not None
    assert much is not None
    assert 1.1 < little < much < math.exp(0.5)


def test_no_order_of_the_rows_changes_an_interval() -> None:
    """Equal rows give equal figures."""
    rows = nested(2, families=6)
    assert fit_intervals(rows) == fit_intervals(rows[::-1])


def test_a_configuration_takes_on_its_error() -> None:
    """All rows of one configuration are 15 % above their prediction: so is its interval."""
    odd = [
        replace(each, log_ratio=0.14) if each.labels.configuration == "c1" else each
        for each in residuals(0.05)
    ]
    made = fit_intervals(odd)
    own, other = (
        made.around(1.0, "tpot", KNOWN._replace(configuration=name)) for name in ("c1", "c5")
    )
    assert own.high_s > 1.15 > other.high_s


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
    assert low.high_s > 1.05
    assert fast.bound("tpot", KNOWN, 0.9) == low.high_s


@settings(max_examples=8, deadline=None)
@given(spread=st.floats(0.01, 1.0), bias=st.floats(-0.5, 0.5), level=st.floats(0.5, 0.97))
def test_bounds_rise_with_confidence(spread: float, bias: float, level: float) -> None:
    """More confidence never means a lower bound, between the levels that are kept and beyond."""
    made = fit_intervals(residuals(spread, count=80, bias=bias))
    low, high = (made.bound("tpot", KNOWN, each) for each in (level, level + 0.02))
    assert low <= high


@pytest.mark.parametrize("log", [0.0, 0.2, -3.0])
@pytest.mark.parametrize("count", [1, 60, 400])
def test_equal_rows_have_an_interval(log: float, count: int) -> None:
    """Rows that all err alike leave nothing between them, and a prediction still has ends."""
    rows = [replace(each, log_ratio=log) for each in residuals(0.1, count=count)]
    for labels in (KNOWN, KNOWN._replace(family="new", configuration="")):
        found = fit_intervals(rows).around(1.0, "tpot", labels)
        assert found is not None
        assert 0 < found.low_s <= 1.0 <= found.high_s < math.inf


def test_a_quantity_without_rows_has_no_interval() -> None:
    """A prediction is inside its own; nothing is said of what was never measured."""
    made = fit_intervals(residuals(0.1))
    own = made.around(2.0, "tpot", KNOWN)
    assert own is not None
    assert own.low_s < 2.0 < own.high_s
    assert own.rows == 10
    assert made.around(2.0, "ttft", KNOWN) is None
    assert made.bound("ttft", KNOWN, 0.9) is None


def test_errors_are_relative_to_the_measurement() -> None:
    """Predicted 2 for a measured 1 is 100 % off, predicted 0.5 is 50 %."""
    found = summarise([math.log(0.5), math.log(2)])
    assert (found.mean, found.median, found.bias) == pytest.approx((0.75, 0.75, 0.25))
    assert summarise([]) is None
