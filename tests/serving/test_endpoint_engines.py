"""The endpoint before real engines: clients, broken bodies, metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from .client import post
from .deployed import endpoint_checks, series

if TYPE_CHECKING:
    from .deployed import Split

pytestmark = pytest.mark.engine

KEY = "a-secret-of-the-tests"


def _look(url: str) -> Any:  # noqa: ANN401
    """Get JSON."""
    with urlopen(Request(url), timeout=60) as answer:  # noqa: S310  (our own endpoint)
        return json.loads(answer.read())


def test_an_unmodified_openai_client(base_url: str) -> None:
    """Models, chats, completions and streams work as its documentation says; errors are typed."""
    assert endpoint_checks("openai", base_url, "demo", KEY) == {
        "models": ["demo"],
        "chat": [4, "assistant"],
        "stream": 4,
        "completion": 4,
        "streamed": "length",
        "refused": [[400, "max_tokens", True], [404, "model", True], [400, "temperature", True]],
    }


def test_ready_and_plan_tell_the_truth(base_url: str) -> None:
    """Both pools are up, a probe came through, and the plan names what runs."""
    assert _look(f"{base_url}/ready") == {"ready": True, "lacking": []}
    plan = _look(f"{base_url}/plan")
    for role in ("prefill", "decode"):
        [replicas] = plan["deployed"]["replicas"][role].values()
        assert replicas == {"planned": 1, "running": 1}
        [facts] = plan["deployed"]["engines"][role].values()
        assert (facts["tp"], facts["dtype"], "model" in facts) == (1, "float32", False)
    assert plan["planned"]["model_id"] == "demo"


def test_metrics_count_what_clients_got(split: Split, base_url: str) -> None:
    """Each request is counted once, with its way; transfers and queues are timed."""
    split.wait_until_released()
    before = series(base_url)
    for number in range(5):
        body = {"prompt": [2500 + number] * 40, "max_tokens": 6, "stream": True, "ignore_eos": True}
        raw = json.dumps(body).encode()
        with urlopen(Request(f"{base_url}/v1/completions", raw), timeout=60) as answer:  # noqa: S310
            assert answer.headers["X-Minicluster-Path"] == "remote"
            assert answer.read().count(b'"choices":[]') == 0  # the usage that we count by
    split.wait_until_released()
    after = series(base_url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['minicluster_requests_total{outcome="ok",path="remote"}'] == 5
    assert grown['minicluster_tokens_total{kind="output"}'] == 30
    for name in ("ttft", "tpot", "kv_transfer", "queue", "prefill", "e2e"):
        assert grown[f"minicluster_{name}_seconds_count"] == 5, name
    assert after['minicluster_replicas{domain="d0",kind="running",role="decode"}'] == 1


def test_broken_bodies_do_no_harm(split: Split, base_url: str) -> None:
    """
    Broken bodies do no harm.

    None is a 5xx, each 4xx names a field, valid requests between them stay right, and after all
    of them both pools answer, and nothing is under way.
    """
    found = endpoint_checks("fuzz", base_url, 300, 5)
    assert found["first"] == []
    assert found["statuses"]["200"] >= 40
    split.wait_until_released()
    status, body = post(f"{base_url}/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
