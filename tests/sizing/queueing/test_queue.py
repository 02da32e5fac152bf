"""Spreads and waiting times: closed forms of M/M/1, M/D/1 and Erlang, order, monotony."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizing.queueing.queue import erlang_c, pooled_wait, single_server_wait
from sizing.queueing.spread import CENTRES, WEIGHTS, LatencyQuantiles, constant, normal, spread

EXPONENTIAL = spread(-np.log(1 - CENTRES), WEIGHTS)
LOADS = st.floats(0.05, 0.95)


@given(utilisation=LOADS, service=st.floats(1e-4, 10))
def test_mean_wait_of_fixed_services(utilisation: float, service: float) -> None:
    """M/D/1: E[W] = rho S / (2 (1 - rho)) (eq. T1)."""
    wait = single_server_wait(constant(service), utilisation)
    assert wait.mean == pytest.approx(utilisation * service / (2 * (1 - utilisation)), rel=1e-3)


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.9])
def test_tail_of_exponential_services(utilisation: float) -> None:
    """M/M/1: P(W > t) = rho e^(-(1 - rho) t) (eq. T1)."""
    wait = single_server_wait(EXPONENTIAL.scaled(1 / EXPONENTIAL.mean), utilisation)
    expected = np.log(utilisation / 0.01) / (1 - utilisation)
    assert wait.quantile(0.99) == pytest.approx(expected, rel=0.01)
    assert wait.mean == pytest.approx(utilisation / (1 - utilisation), rel=0.01)


def test_erlang_c() -> None:
    """Known values: rho for one server, 2 rho^2 / (1 + rho) for two (eq. T2)."""
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 0.7) == pytest.approx(2 * 0.49 / 1.7)
    assert erlang_c(100, 0.5) < 1e-6


@pytest.mark.parametrize("servers", [1, 2, 10])
def test_tail_of_pooled_exponential_services(servers: int) -> None:
    """M/M/c: P(W > t) = C e^(-c (1 - rho) t), which eq. T2 gives exactly."""
    wait = pooled_wait(EXPONENTIAL.scaled(1 / EXPONENTIAL.mean), 0.9, servers)
    expected = np.log(erlang_c(servers, 0.9) / 0.01) / (servers * 0.1)
    assert wait.quantile(0.99) == pytest.approx(expected, rel=0.01)


@given(low=LOADS, more=st.floats(1.01, 1.5))
def test_more_load_never_waits_less(low: float, more: float) -> None:
    """Every quantile of the wait grows with the load."""
    high = min(low * more, 0.97)
    before, after = (single_server_wait(EXPONENTIAL, load).values for load in (low, high))
    assert (after >= before - 1e-2 * after.max() / len(after)).all()


def test_an_empty_queue_has_no_wait() -> None:
    """Without load nobody waits."""
    assert single_server_wait(constant(1.0), 0.0).mean == 0
    assert pooled_wait(constant(1.0), 0.0, 3).mean == 0


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_gathering_keeps_mean_and_order(values: list[float]) -> None:
    """A spread has the mean of its samples, ascending values, and stays within their range."""
    gathered = spread(values)
    assert gathered.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert (np.diff(gathered.values) >= 0).all()
    assert min(values) - 1e-9 <= gathered.quantile(0.01) <= gathered.quantile(0.99)
    assert gathered.quantile(0.99) <= max(values) + 1e-9


@given(
    means=st.tuples(st.floats(-5, 5), st.floats(-5, 5)),
    deviations=st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)),
)
def test_sums_of_normals(means: tuple[float, float], deviations: tuple[float, float]) -> None:
    """Independent normals add up to a normal with the sum of the variances."""
    total = normal(means[0], deviations[0]).plus(normal(means[1], deviations[1]))
    expected = normal(sum(means), float(np.hypot(*deviations)))
    for level in (0.5, 0.9, 0.99):
        assert total.quantile(level) == pytest.approx(
            expected.quantile(level), abs=0.02 * float(np.hypot(*deviations))
        )


def test_adding_a_constant_shifts() -> None:
    """A constant moves every value and changes no shape."""
    shifted = EXPONENTIAL.plus(constant(2.0))
    assert shifted.values == pytest.approx(EXPONENTIAL.values + 2)
    assert constant(2.0).plus(EXPONENTIAL).values == pytest.approx(shifted.values)
    assert isinstance(shifted, LatencyQuantiles)
