"""The endpoint's time limits of the replicas behind it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.specs.slo import SloSpec
from serving.protocol.endpoint_config import endpoint_config
from tests.serving.configs import unplanned

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from serving.replicas.serve_backend import first_token_limit_s, whole_answer_limit_s

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.conftest import DeploymentMaker, PlanMaker

CONFIG = unplanned(
    prefill_deadline_s=1.0, kv_wait_deadline_s=1.0, max_model_len=2000, max_num_seqs=8
)


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
def test_an_answer_in_one_piece_has_time_for_the_tokens_it_may_have(
    kind: str, body: dict[str, Any], tokens: int
) -> None:
    """A second per requested token, or per token of the context, in turns of eight sequences."""
    assert whole_answer_limit_s(CONFIG, kind, body) == pytest.approx(4.0 + tokens * 1.0)


def test_limits_are_the_plans(
    make_deployment: DeploymentMaker, make_plan: PlanMaker, small_model: Path
) -> None:
    """
    Deadlines are twice the SLO's TTFT, and a first token has 2 s beyond both of them.

    A token has ten times the pace of the SLO; without a plan a second.
    """
    deployment = make_deployment(small_model)
    plan = make_plan(deployment).under(slo=SloSpec(ttft_s=0.5, tpot_s=0.05))
    config = endpoint_config(deployment, domains={"laptop": "d0"}, plan=plan)
    assert (config.prefill_deadline_s, first_token_limit_s(config)) == (1.0, 4.0)
    chat, batch = {"messages": []}, {"prompt": "x", "max_tokens": 1, "n": 17}
    assert whole_answer_limit_s(config, "chat", chat) == pytest.approx(4.0 + 2048 * 0.5)
    assert whole_answer_limit_s(config, "completions", batch) == pytest.approx(4.0 + 2 * 0.5)
    without = endpoint_config(deployment, domains={"laptop": "d0"})
    first_s = first_token_limit_s(without)
    assert whole_answer_limit_s(without, "chat", chat) == pytest.approx(first_s + 2048)
