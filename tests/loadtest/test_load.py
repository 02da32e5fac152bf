from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load import busy_fraction, mean_concurrent, pool_loads
from loadtest.schedule import Window

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


def test_prefill_utilisation_is_what_was_asked_of_the_pool(
    make_plan: PlanMaker, make_sample: SampleMaker
) -> None:
    """Forty prompts a second of 32 tokens at 10 ms + 0.1 ms a token keep prefill 52.8 % busy."""
    samples = [make_sample(k, 10 + k / 40) for k in range(400)]
    prefill, decode = pool_loads(make_plan(), samples, WINDOW)

    assert prefill.measured_utilisation_fraction == pytest.approx(40 * (0.01 + 32e-4))
    assert prefill.measured_concurrent == pytest.approx(40 * 0.05, rel=0.01)
    assert decode.predicted_concurrent == pytest.approx(40 * 0.18)
    assert decode.measured_concurrent == pytest.approx(40 * 0.18, rel=0.02)
