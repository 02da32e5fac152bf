"""What endpoint processes and their gate cost, and how many a load needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizing.catalog.endpoint import endpoint_cost

COST = replace(
    endpoint_cost(), request_s=0.01, token_s=20e-6, gate_request_s=2e-3, busy_fraction=0.5
)


def test_requests_and_tokens_add_up() -> None:
    load = COST.load(requests_per_s=100, output_tokens_per_s=50_000, streams=1000)
    assert (load.cores, load.gate_cores) == pytest.approx((2.0, 0.2))
    assert load.processes == 4
    expected = 5 * COST.process_bytes + 1000 * COST.stream_bytes
    assert load.memory_bytes == pytest.approx(expected)
    assert COST.gate_requests_per_s == pytest.approx(250)


@given(st.floats(0.01, 1e4), st.floats(0, 1e7))
def test_no_process_is_busier_than_allowed(rate: float, tokens_per_s: float) -> None:
    """And one fewer would be; a spare one is one more."""
    load = COST.load(requests_per_s=rate, output_tokens_per_s=tokens_per_s, streams=0)
    busy = load.cores / COST.busy_fraction
    assert load.processes - 1 <= busy + 1e-6 or load.processes == 1
    assert busy <= load.processes * (1 + 1e-6)
    spare = COST.load(requests_per_s=rate, output_tokens_per_s=tokens_per_s, streams=0, spare=True)
    assert spare.processes == load.processes + 1


def test_the_figures_have_a_source_and_carry_a_first_plan() -> None:
    """Ten requests/s of 300 tokens fit one process; a plan of a thousand GPUs does not."""
    cost = endpoint_cost()
    assert "benchmarks/token_path.py" in cost.document
    small = cost.load(requests_per_s=10, output_tokens_per_s=3000, streams=50)
    assert (small.processes, cost.gate_requests_per_s > 100) == (1, True)
    large = cost.load(requests_per_s=500, output_tokens_per_s=250_000, streams=20_000)
    assert large.processes > 5
