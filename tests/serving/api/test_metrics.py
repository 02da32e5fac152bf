from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from serving.api.metrics import Metrics
from serving.protocol.endpoint_config import endpoint_config
from tests.serving.plans import make_deployment, make_plan

if TYPE_CHECKING:
    from pathlib import Path


PARTS_S = {"ingress": 100.0, "prefill_queue": 20.0, "prefill": 3.4, "first_decode_step": 0.00078}
"""Of a plan in which the KV cache comes at once: what takes nothing is left out."""


def _planned(config: object) -> dict[str, float | None]:
    registry = Metrics(config)._registry  # type: ignore[arg-type]
    return {
        name: registry.get_sample_value(
            "minicluster_planned_seconds", {"quantity": name, "percentile": "mean"}
        )
        for name in ("prefill_queue", "prefill", "handoff")
    }


def test_phases_stand_beside_what_was_planned(small_model: Path) -> None:
    """The hand-off as a sum; without remote prompts they are not measured either."""
    deployment = make_deployment(small_model)
    config = endpoint_config(deployment, domains={"laptop": "d0"}, plan=make_plan(deployment))
    assert config.prediction is not None
    planned = replace(config, prediction=replace(config.prediction, ttft_parts_s=PARTS_S))
    expected = {"prefill_queue": 20.0, "prefill": 3.4, "handoff": 0.00078}
    assert _planned(planned) == pytest.approx(expected)
    together = replace(planned, pools=config.pools[1:])
    assert set(_planned(together).values()) == {None}
