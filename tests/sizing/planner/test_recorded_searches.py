"""Plans as they were found: who changes one means it, and says why in the commit."""

from __future__ import annotations

from typing import Any

import pytest

import sizing
from sizing.planner.studies.result import layout_of

SMALL, LARGE = "llama-3.1-8b-h100", "llama-3.1-70b-h100"
VARIED = {"distribution": "lognormal", "median": 1000, "sigma": 1.5, "high": 16_000}
"""Prompts of which most are short and a few long."""

PLANS: list[tuple[str, dict[str, Any], str, int]] = [
    (SMALL, {}, "3xTP1 mixed", 3),
    (SMALL, {"search.spare_replicas": 1}, "4xTP1 mixed", 4),
    (
        SMALL,
        {"search.pools": "split", "workload.requests_per_s": 400, "cluster.max_gpus": 512},
        "28xTP1 + 20xTP1",
        48,
    ),
    (LARGE, {}, "10xTP4 + 2xTP8", 56),
    (
        "llama-3.1-70b-h100-2rps",
        {
            "workload.requests_per_s": 4,
            "workload.input_tokens": VARIED,
            "workload.output_tokens": 200,
            "slo.ttft_s": 2,
            "slo.tpot_s": 0.1,
            "search.routing": "power-of-two",
            "search.pools": "split",
        },
        "3xTP4 + 1xTP4",  # short prompts are computed where they are decoded
        16,
    ),
    ("mixed-gpus-70b", {"workload.requests_per_s": 3}, "2xTP8 mixed", 16),
    (
        "deepseek-v3-h200",
        {"workload.requests_per_s": 80, "search.pools": "split", "cluster.max_gpus": 1024},
        "28xTP8xEP8 + 3xTP1xDP16xEP16",
        272,
    ),
    ("chat-and-summaries-8b", {}, "2xTP1 + 2xTP4", 10),
]
"""Scenario, keys, and the layout and GPUs of the plan."""


@pytest.mark.parametrize(("scenario", "keys", "layout", "gpus"), PLANS)
def test_plans_are_those_recorded(
    scenario: str, keys: dict[str, Any], layout: str, gpus: int
) -> None:
    plan = sizing.plan(sizing.Scenario.load(scenario, keys))
    assert (layout_of(plan), plan.cost.gpus) == (layout, gpus)
