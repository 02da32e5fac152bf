"""Power of two choices: against an event simulation, and against published simulations."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizing.queueing.queue import single_server_wait
from sizing.queueing.spread import WEIGHTS, LatencyQuantiles, constant
from sizing.queueing.two_choices import two_choices_wait
from tests.sizing.queues import SERVICES

if TYPE_CHECKING:
    from numpy.typing import NDArray


def simulated_wait(
    service: NDArray[np.float64], utilisation: float, servers: int, seed: int
) -> NDArray[np.float64]:
    """Waits of requests that join the shorter of two queues, mean service 1, warm-up cut."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / (utilisation * servers), len(service))
    first = rng.integers(servers, size=len(service))
    second = (first + 1 + rng.integers(servers - 1, size=len(service))) % servers
    queues: list[deque[float]] = [deque() for _ in range(servers)]
    waits = np.empty(len(service))
    for i, (now, needed) in enumerate(zip(np.cumsum(gaps), service, strict=True)):
        pair = (queues[first[i]], queues[second[i]])
        for queue in pair:
            while queue and queue[0] <= now:
                queue.popleft()
        queue = min(pair, key=len)
        start = max(now, queue[-1]) if queue else now
        queue.append(start + needed)
        waits[i] = start - now
    return waits[len(waits) // 10 :]


def drawn(service: LatencyQuantiles, count: int, seed: int) -> NDArray[np.float64]:
    """Draw services."""
    return np.random.default_rng(seed).choice(service.values, count, p=WEIGHTS)


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize(
    ("servers", "utilisation"), [(2, 0.6), (4, 0.8), (8, 0.3), (28, 0.89), (48, 0.8)]
)
def test_sojourn_against_simulation(kind: str, servers: int, utilisation: float) -> None:
    """Mean and p95 of wait and service within 10 %, p99 within 15 % of an event simulation."""
    service = SERVICES[kind]
    waits = simulated_wait(drawn(service, 60_000, seed=1), utilisation, servers, seed=2)
    services = drawn(service, len(waits), seed=3)
    sojourn = waits + services
    predicted = two_choices_wait(service, utilisation, servers).plus(service)
    assert predicted.mean == pytest.approx(sojourn.mean(), rel=0.1)
    assert predicted.quantile(0.95) == pytest.approx(np.percentile(sojourn, 95), rel=0.1)
    assert predicted.quantile(0.99) == pytest.approx(np.percentile(sojourn, 99), rel=0.15)


@pytest.mark.parametrize(
    ("servers", "p95_s", "p99_s"), [(28, 1.39, 1.63), (36, 0.97, 1.16), (48, 0.85, 0.97)]
)
def test_our_research_table(servers: int, p95_s: float, p99_s: float) -> None:
    """
    TTFT of 28, 36 and 48 prefill workers with a service of 0.498 s within 10 %.

    The table is an independent simulation of 50 requests/s behind power-of-two routing.
    """
    wait = two_choices_wait(constant(0.498), 0.89 * 28 / servers, servers)
    assert 0.498 + wait.quantile(0.95) == pytest.approx(p95_s, rel=0.1)
    assert 0.498 + wait.quantile(0.99) == pytest.approx(p99_s, rel=0.1)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(SERVICES)),
    servers=st.integers(2, 64),
    utilisation=st.floats(0.1, 0.9),
    more=st.floats(1.02, 1.1),
)
def test_more_load_waits_longer_and_more_servers_less(
    kind: str, servers: int, utilisation: float, more: float
) -> None:
    """At p99 and in the mean, load adds to the wait, and servers at the same load take from it."""
    service = SERVICES[kind]
    wait = two_choices_wait(service, utilisation, servers)
    loaded = two_choices_wait(service, utilisation * more, servers)
    wider = two_choices_wait(service, utilisation, 2 * servers)
    for level in (0.9, 0.95, 0.99):
        assert loaded.quantile(level) >= wait.quantile(level) * (1 - 1e-3)
        assert wider.quantile(level) <= wait.quantile(level) * (1 + 1e-3) + 1e-6
    assert loaded.mean >= wait.mean


def test_one_server_is_exact() -> None:
    """With one replica there is nothing to choose: M/G/1."""
    one = two_choices_wait(SERVICES["lognormal"], 0.7, 1)
    assert one.values == pytest.approx(single_server_wait(SERVICES["lognormal"], 0.7).values)


def test_times_scale_with_the_service() -> None:
    """
    A service k times as long makes every wait k times as long.

    Its shape differs in the last bit then, as it does between CPUs: what the iteration makes of
    that stays far below what its end, 1e-10 of a share of queues, may leave.
    """
    for utilisation in (0.3, 0.8, 0.985):
        short = two_choices_wait(SERVICES["exponential"], utilisation, 5)
        for k in (3.0, 7.0, 10.0):
            longer = two_choices_wait(SERVICES["exponential"].scaled(k), utilisation, 5)
            assert longer.values == pytest.approx(k * short.values, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("kind", SERVICES)
def test_more_load_never_waits_less(kind: str) -> None:
    """Every quantile grows with the load, up to the last percent, for many servers."""
    loads = np.linspace(0.05, 0.99, 48)
    waits = [two_choices_wait(SERVICES[kind], float(load), 171).values for load in loads]
    assert (np.diff(waits, axis=0) >= -1e-6).all()


@pytest.mark.parametrize("utilisation", [0.87, 0.95])
def test_many_servers_near_saturation(utilisation: float) -> None:
    """Mean and p99 of the wait behind 171 servers within 6 % of an event simulation."""
    waits = simulated_wait(np.ones(100_000), utilisation, 171, seed=4)
    predicted = two_choices_wait(constant(1.0), utilisation, 171)
    assert predicted.mean == pytest.approx(waits.mean(), rel=0.06)
    assert predicted.quantile(0.99) == pytest.approx(np.percentile(waits, 99), rel=0.06)
