"""The wait behind least-tokens routing: against an event simulation, and who asks for it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sizing.queueing.least_tokens import least_tokens_wait
from sizing.queueing.spread import CENTRES, STANDARD_NORMAL, WEIGHTS, LatencyQuantiles, spread
from sizing.queueing.stage import PoolStage, TandemLoad
from sizing.queueing.two_choices import two_choices_wait
from tests.sizing.queues import LOGNORMAL, tandem

if TYPE_CHECKING:
    from numpy.typing import NDArray

SERVICES = {
    "alike": spread(0.7 + 0.6 * CENTRES, WEIGHTS),
    "half": LatencyQuantiles(values=np.exp(0.472 * STANDARD_NORMAL)).scaled(1 / 1.1178),
    "lognormal": LOGNORMAL.scaled(1 / LOGNORMAL.mean),
}


def simulated_wait(
    service: NDArray[np.float64], utilisation: float, servers: int, seed: int
) -> NDArray[np.float64]:
    """Waits where each prompt joins the queue with the fewest tokens; service as tokens."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / (utilisation * servers), len(service))
    queues: list[deque[tuple[float, float]]] = [deque() for _ in range(servers)]
    waits = np.empty(len(service))
    for i, (now, needed) in enumerate(zip(np.cumsum(gaps), service, strict=True)):
        for queue in queues:
            while queue and queue[0][0] <= now:
                queue.popleft()
        queue = min(queues, key=lambda each: sum(tokens for _, tokens in each))
        start = max(now, queue[-1][0]) if queue else now
        queue.append((start + needed, needed))
        waits[i] = start - now
    return waits[len(waits) // 10 :]


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize(("servers", "utilisation"), [(2, 0.6), (4, 0.8), (8, 0.5), (16, 0.85)])
def test_sojourn_against_simulation(kind: str, servers: int, utilisation: float) -> None:
    """Mean, p95 and p99 of wait and service within 10 % of an event simulation."""
    service = SERVICES[kind]
    rng = np.random.default_rng(1)
    services = rng.choice(service.values, 60_000, p=WEIGHTS)
    waits = simulated_wait(services, utilisation, servers, seed=2)
    sojourn = waits + services[-len(waits) :]
    predicted = least_tokens_wait(service, utilisation, servers).plus(service)
    assert predicted.mean == pytest.approx(sojourn.mean(), rel=0.1)
    assert predicted.quantile(0.95) == pytest.approx(np.percentile(sojourn, 95), rel=0.1)
    assert predicted.quantile(0.99) == pytest.approx(np.percentile(sojourn, 99), rel=0.1)


@pytest.mark.parametrize("servers", [2, 8, 48])
@pytest.mark.parametrize("utilisation", [0.3, 0.8, 0.95])
def test_waits_less_than_behind_two_choices(servers: int, utilisation: float) -> None:
    """To know all queues is never worse than to know two."""
    for service in SERVICES.values():
        found = least_tokens_wait(service, utilisation, servers)
        assert found.mean <= two_choices_wait(service, utilisation, servers).mean * (1 + 1e-6)


def sized(routing: str, decode: int) -> TandemLoad:
    """Return three prefill replicas before *decode* of them."""
    load = tandem(12.0, prefill=3)
    return TandemLoad(
        workload=load.workload,
        step_model=load.step_model,
        prefill=load.prefill,
        decode=PoolStage(replicas=decode, max_batch_size=64, max_batched_tokens=8192),
        routing=routing,
    )


@pytest.mark.parametrize(
    ("routing", "decode", "policy"),
    [
        ("auto", 1, "least-tokens"),
        ("auto", 2, "power-of-two"),
        ("least-tokens", 2, "least-tokens"),
        ("power-of-two", 1, "power-of-two"),
    ],
)
def test_auto_counts_tokens_where_one_asks(routing: str, decode: int, policy: str) -> None:
    """Several routers do not see one another's requests in time; then two choices are safer."""
    assert sized(routing, decode).prefill_policy == policy
