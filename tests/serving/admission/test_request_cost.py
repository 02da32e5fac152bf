"""What a request asks for: of the fields of its own endpoint, as the engine reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from serving.admission.policy import request_cost
from serving.protocol.endpoint_config import EndpointConfig, endpoint_config
from serving.request.length import DEFAULT_ESTIMATE, TokenEstimate
from serving.request.validation import check

if TYPE_CHECKING:
    from pathlib import Path

    from serving.admission.policy import RequestCost
    from tests.serving.conftest import DeploymentMaker, PlanMaker

LONG = [{"role": "user", "content": "x" * 4000}]


@pytest.fixture(scope="module")
def config(
    make_deployment: DeploymentMaker, make_plan: PlanMaker, small_model: Path
) -> EndpointConfig:
    """Return a plan of answers of ten tokens."""
    deployment = make_deployment(small_model)
    return endpoint_config(deployment, domains={"laptop": "d0"}, plan=make_plan(deployment))


def _asked(
    kind: str,
    body: dict[str, object],
    config: EndpointConfig,
    size: TokenEstimate = DEFAULT_ESTIMATE,
) -> RequestCost:
    """Return the cost of a request as the endpoint does."""
    limits = {"model_id": config.model_id, "max_model_len": config.max_model_len}
    return request_cost(kind, check(kind, body, **limits), config, size)


@pytest.mark.parametrize(
    ("kind", "lengths", "tokens"),
    [
        ("completions", {}, 16),
        ("completions", {"max_tokens": None}, 10),
        ("completions", {"max_tokens": 900, "max_completion_tokens": 1}, 900),
        ("completions", {"max_tokens": 0, "echo": True}, 1),
        ("chat", {}, 10),
        ("chat", {"max_tokens": 900}, 900),
        ("chat", {"max_tokens": 900, "max_completion_tokens": 7}, 7),
    ],
)
def test_answers_are_as_long_as_the_engine_makes_them(
    config: EndpointConfig, kind: str, lengths: dict[str, object], tokens: int
) -> None:
    """Named, or vLLM's default, or where that is all the context the longest planned."""
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **lengths}
    assert _asked(kind, body, config).output_tokens == tokens


def test_a_chat_is_sized_by_its_messages(config: EndpointConfig) -> None:
    """Neither its size nor its way depend on a prompt that the engine does not read."""
    for prompt in ("x", ["a", "b"], [[1], [2]]):
        asked = _asked("chat", {"messages": LONG, "prompt": prompt}, config)
        assert (asked.prompt_tokens, asked.sequences, asked.local) == (1000, 1, False)


def test_the_size_of_text_is_the_learned_one(config: EndpointConfig) -> None:
    """Overhead and all, but never more than the context; ids are counted."""
    size = TokenEstimate(overhead_tokens=100, tokens_per_byte=0.5)
    assert _asked("completions", {"prompt": "x" * 400}, config, size).prompt_tokens == 300
    assert _asked("completions", {"prompt": [5] * 400}, config, size).prompt_tokens == 400
    assert _asked("chat", {"messages": LONG}, config, size).prompt_tokens == 2048
