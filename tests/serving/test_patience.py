from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minicluster.specs.slo import SloSpec
from serving.protocol.endpoint_config import front_door
from serving.replicas.timeouts import Timeouts, patience_of

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import DeploymentMaker, PlanMaker

PATIENCE = Timeouts(prefill_s=1.0, first_token_s=4.0, token_s=0.5, max_tokens=2000, places=8)


@pytest.mark.parametrize(
    ("kind", "body", "tokens"),
    [
        ("completions", {"prompt": "x", "max_tokens": 10}, 10),
        ("completions", {"prompt": "x"}, 16),
        ("completions", {"prompt": "x", "max_tokens": 0, "echo": True}, 0),
        ("completions", {"prompt": "x", "max_completion_tokens": 1}, 16),
        ("completions", {"prompt": "x", "max_tokens": None}, 2000),
        ("chat", {"messages": []}, 2000),
        ("chat", {"messages": [], "max_tokens": 10}, 10),
        ("chat", {"messages": [], "max_tokens": 10, "max_completion_tokens": 20}, 20),
        ("completions", {"prompt": "x", "max_tokens": 10, "n": 8}, 10),
        ("completions", {"prompt": "x", "max_tokens": 10, "n": 9}, 20),
        ("completions", {"prompt": ["x"] * 5, "max_tokens": 10, "n": 4}, 30),
        ("completions", {"prompt": "x", "max_tokens": 10, "use_beam_search": True}, 10),
    ],
)
def test_a_whole_answer_has_time_for_the_tokens_it_may_have(
    kind: str, body: dict[str, Any], tokens: int
) -> None:
    """Those asked for, or as many as there can be, in as many turns as the places make it take."""
    assert PATIENCE.whole_s(kind, body) == pytest.approx(4.0 + tokens * 0.5)


def test_limits_are_the_plans(
    make_deployment: DeploymentMaker, make_plan: PlanMaker, small_model: Path
) -> None:
    """
    Deadlines are twice the SLO's TTFT, and a first token has 2 s beyond both of them.

    A token has ten times the promised pace; without a plan a second.
    """
    deployment = make_deployment(small_model)
    plan = make_plan(deployment).under(slo=SloSpec(ttft_s=0.5, tpot_s=0.05))
    front = front_door(deployment, domains={"laptop": "d0"}, plan=plan)
    assert patience_of(front) == Timeouts(
        prefill_s=1.0,
        first_token_s=4.0,
        token_s=0.5,
        max_tokens=2048,
        places=16,
    )
    unplanned = front_door(deployment, domains={"laptop": "d0"})
    assert patience_of(unplanned).token_s == 1.0
