from __future__ import annotations

import pytest

from loadtest.run.schedule import Window
from loadtest.verdict.pool_load import pool_loads
from loadtest.verdict.resimulation import PredictedRequest, Resimulation
from tests.loadtest.made import make_plan, make_sample

WINDOW = Window(start_s=10.0, end_s=20.0, drain_s=5.0)
FORETOLD = PredictedRequest(
    ttft_s=0.1, tpot_s=0.02, e2e_s=0.5, longest_stall_s=0.02, phases_s={"prefill": 0.1}
)


def test_requests_in_flight_follow_littles_law() -> None:
    """Forty requests a second; only what they spend within the window counts."""
    samples = [make_sample(k, k / 40) for k in range(1200)]
    simulated = Resimulation(
        requests=dict.fromkeys(range(1200), FORETOLD),
        itl={},
        busy_fraction={"prefill": 0.2, "decode": 0.3},
    )
    prefill, decode = pool_loads(make_plan(), samples, WINDOW, simulated)

    assert prefill.measured_concurrent == pytest.approx(40 * 0.05)
    assert prefill.predicted_concurrent == pytest.approx(40 * 0.1)
    assert decode.measured_concurrent == pytest.approx(40 * 0.18)
    assert decode.predicted_concurrent == pytest.approx(40 * 0.4)
    assert prefill.predicted_utilisation_fraction == 0.2


def test_without_a_simulation_the_plans_own_load_is_beside() -> None:
    """What waits for its first token until it fails is in the prefill pool."""
    lost = [make_sample(k, 10.0, ttft_s=None, outcome="timeout", end_s=30.0) for k in range(3)]
    prefill, decode = pool_loads(make_plan(), lost, WINDOW, None)

    assert prefill.measured_concurrent == pytest.approx(3)
    assert decode.measured_concurrent == 0
    assert (prefill.predicted_utilisation_fraction, decode.predicted_utilisation_fraction) == (
        0.5,
        0.6,
    )
    assert decode.predicted_concurrent == pytest.approx(40 * 0.18)
