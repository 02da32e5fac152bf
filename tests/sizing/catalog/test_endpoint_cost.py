"""What the endpoint's process costs, and plans that it does not carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizing.catalog.endpoint import endpoint_cost


def test_requests_and_tokens_add_up() -> None:
    cost = replace(endpoint_cost(), request_s=0.01, token_s=20e-6)
    assert cost.cores(requests_per_s=10, output_tokens_per_s=5000) == pytest.approx(0.2)


def test_the_figures_have_a_source_and_carry_a_first_plan() -> None:
    """Ten requests/s of 300 tokens fit one process; a plan of a thousand GPUs does not."""
    cost = endpoint_cost()
    assert "benchmarks/token_path.py" in cost.document
    assert cost.cores(requests_per_s=10, output_tokens_per_s=3000) < cost.busy_fraction
    assert cost.cores(requests_per_s=500, output_tokens_per_s=250_000) > 2.0
