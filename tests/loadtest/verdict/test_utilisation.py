from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.run.schedule import Window
from loadtest.verdict.utilisation import busy_fraction, mean_concurrent, pool_loads, utilisations
from minicluster.specs.step import Interference

if TYPE_CHECKING:
    from conftest import PlanMaker, SampleMaker

WINDOW = Window(start_s=10.0, end_s=20.0, drain_s=5.0)
SPANS = st.lists(
    st.tuples(st.floats(0, 30), st.floats(0, 30)).map(lambda pair: (min(pair), max(pair)))
)


@given(SPANS)
def test_busy_is_a_share_and_at_most_the_mean(spans: list[tuple[float, float]]) -> None:
    """The share with somebody there is at most 1 and at most how many are there on average."""
    busy, mean = busy_fraction(spans, WINDOW), mean_concurrent(spans, WINDOW)

    assert 0 <= busy <= 1 + 1e-12
    assert busy <= mean + 1e-9


def test_little_law() -> None:
    """Ten requests a second that stay two seconds are twenty at a time."""
    spans = [(0.1 * k, 0.1 * k + 2.0) for k in range(400)]

    assert mean_concurrent(spans, WINDOW) == pytest.approx(20.0)
    assert busy_fraction(spans, WINDOW) == pytest.approx(1.0)


def test_utilisation_is_what_was_asked_of_the_pools(
    make_plan: PlanMaker, make_sample: SampleMaker
) -> None:
    """
    Forty requests a second of 32 tokens in and 10 out, by hand.

    Prefill in batches of 8: 10 ms / 8 + 0.1 ms a token. Decode: 10 tokens of 10 ms / 8.
    """
    samples = [make_sample(k, 10 + k / 40) for k in range(400)]
    prefill, decode = pool_loads(make_plan(), samples, WINDOW)

    assert prefill.measured_utilisation_fraction == pytest.approx(40 * (0.01 / 8 + 32e-4))
    assert decode.measured_utilisation_fraction == pytest.approx(40 * 10 * 0.01 / 8)
    assert prefill.measured_concurrent == pytest.approx(40 * 0.05, rel=0.01)
    assert decode.predicted_concurrent == pytest.approx(40 * 0.18)
    assert decode.measured_concurrent == pytest.approx(40 * 0.18, rel=0.02)


def test_interference_raises_utilisation(make_plan: PlanMaker, make_sample: SampleMaker) -> None:
    """Where the pools slow each other down, the same load takes more of both."""
    plan = make_plan()
    between = Interference(prefill_fraction=0.5, decode_fraction=0.5)
    shared = replace(plan, step_model=replace(plan.step_model, interference=between))
    samples = [make_sample(k, 10 + k / 40) for k in range(400)]
    alone, slowed = (utilisations(p, samples, 10.0) for p in (plan, shared))

    assert slowed["prefill"] == pytest.approx(1.5 * alone["prefill"])
    assert alone["decode"] < slowed["decode"] < 1.5 * alone["decode"]
