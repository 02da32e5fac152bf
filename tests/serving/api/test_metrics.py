from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from serving.api.metrics import Metrics
from serving.protocol.endpoint_config import endpoint_config
from tests.serving.plans import make_deployment, make_plan

if TYPE_CHECKING:
    from pathlib import Path


FORMULAS = {
    "request overhead": 100.0,
    "prefill queue": 20.0,
    "prefill": 3.0,
    "interference of decode": 0.4,
    "kv transfer": 0.05,
    "decode queue": 0.006,
    "decode step in progress": 0.0007,
    "first decode step": 0.00008,
}
SIMULATED = {
    "request overhead": 100.0,
    "queue": 20.0,
    "prefill": 3.4,
    "decode admission": 0.006,
    "kv transfer": 0.05,
    "first decode step": 0.00078,
}
"""The phases of a plan, as `sizing.queueing` and `sizing.simulation` call them."""


def _planned(config: object) -> dict[str, float | None]:
    registry = Metrics(config)._registry  # type: ignore[arg-type]
    return {
        name: registry.get_sample_value(
            "minicluster_planned_seconds", {"quantity": name, "percentile": "mean"}
        )
        for name in ("queue", "prefill", "kv_transfer")
    }


@pytest.mark.parametrize("parts_s", [FORMULAS, SIMULATED])
def test_phases_stand_beside_what_was_planned(parts_s: dict[str, float], small_model: Path) -> None:
    """From either predictor; without remote prompts they are not measured either."""
    deployment = make_deployment(small_model)
    config = endpoint_config(deployment, domains={"laptop": "d0"}, plan=make_plan(deployment))
    assert config.prediction is not None
    planned = replace(config, prediction=replace(config.prediction, ttft_parts_s=parts_s))
    expected = {"queue": 20.0, "prefill": 3.4, "kv_transfer": 0.05678}
    assert _planned(planned) == pytest.approx(expected)
    together = replace(planned, pools=config.pools[1:])
    assert set(_planned(together).values()) == {None}
