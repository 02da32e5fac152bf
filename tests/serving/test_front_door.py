"""The front door before real engines: clients, broken bodies, metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from .client import post
from .deployed import front_checks, up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sizing.plan import Plan

pytestmark = pytest.mark.engine

KEY = "a-secret-of-the-tests"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, exact_plan: Plan) -> Iterator[str]:
    """Have it deployed."""
    with up(tmp_path_factory.mktemp("door"), exact_plan) as found:
        yield found


def _look(url: str) -> Any:  # noqa: ANN401
    """Get JSON."""
    with urlopen(Request(url), timeout=60) as answer:  # noqa: S310  (our own endpoint)
        return json.loads(answer.read())


def test_an_unmodified_openai_client(url: str) -> None:
    """Models, chats, completions and streams work as its documentation says; errors are typed."""
    assert front_checks("openai", url, "demo", KEY) == {
        "models": ["demo"],
        "chat": [4, "assistant"],
        "stream": 4,
        "completion": 4,
        "streamed": "length",
        "refused": [
            [400, "max_tokens", True],
            [404, "model", True],
            [400, "temperature", True],
        ],
    }


def test_ready_and_plan_tell_the_truth(url: str) -> None:
    """Both pools are up, a probe came through, and the plan names what runs."""
    assert _look(f"{url}/ready") == {"ready": True, "lacking": []}
    plan = _look(f"{url}/plan")
    for role in ("prefill", "decode"):
        [replicas] = plan["deployed"]["replicas"][role].values()
        assert replicas == {"planned": 1, "running": 1}
        [facts] = plan["deployed"]["engines"][role].values()
        assert (facts["tp"], facts["dtype"], "model" in facts) == (1, "float32", False)
    assert plan["planned"]["model_id"] == "demo"


def test_metrics_count_what_clients_got(url: str) -> None:
    """Each request is counted once, with its way; transfers and queues are timed."""
    before = _series(url)
    for number in range(5):
        body = {"prompt": [2500 + number] * 40, "max_tokens": 6, "stream": True, "ignore_eos": True}
        raw = json.dumps(body).encode()
        with urlopen(Request(f"{url}/v1/completions", raw), timeout=60) as answer:  # noqa: S310
            assert answer.headers["X-Minicluster-Path"] == "remote"
            assert answer.read().count(b'"choices":[]') == 0  # the usage that we count by
    after = _series(url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['minicluster_requests_total{outcome="ok",path="remote"}'] == 5
    assert grown['minicluster_tokens_total{kind="output"}'] == 30
    for name in ("ttft", "tpot", "kv_transfer", "queue", "prefill", "e2e"):
        assert grown[f"minicluster_{name}_seconds_count"] == 5, name
    assert after['minicluster_outstanding_requests{stage="all"}'] == 0
    assert after['minicluster_replicas{domain="d0",kind="running",role="decode"}'] == 1


def _series(url: str) -> dict[str, float]:
    """Scrape."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_broken_bodies_do_no_harm(url: str) -> None:
    """None is a 5xx, each 4xx names a field, and valid requests between them stay right."""
    found = front_checks("fuzz", url, 300, 5)
    assert found["first"] == []
    assert found["statuses"]["200"] >= 40


def test_the_engines_live(url: str) -> None:
    """After all this both pools answer, and nothing is under way."""
    status, body = post(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    assert _series(url)['minicluster_outstanding_requests{stage="all"}'] == 0
