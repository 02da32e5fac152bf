"""What can be seen through the endpoint, and by whom: models, health, metrics, plan, page."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from minicluster.workload.engine_steps import EngineStep
from serving.protocol.messages import EndpointConfig, SimulatedEngines
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import HI, KEY, LOCKED, ONE, one, visiting
from tests.serving.virtual_time import in_virtual_time

GUARDED = [
    *((path, None) for path in ("/v1/models", "/v1/models/demo", "/plan", "/metrics")),
    ("/engine-steps?begin=0&end=20", None),
    *((path, ONE | HI) for path in ("/v1/completions", "/v1/chat/completions")),
    ("/internal/prefill", ONE),
]


@pytest.mark.parametrize(("path", "body"), GUARDED)
def test_keys_lock_what_tells_something(
    config: EndpointConfig, path: str, body: dict[str, Any] | None
) -> None:
    """With keys, everything but health, readiness, schema and the empty page wants one."""
    assert one(config, path, body).status_code == 200
    right, servers = {"Authorization": f"Bearer {KEY}"}, FakeServers()
    for wrong in ({}, {"Authorization": f"Bearer {KEY}x"}):
        refused = one(config, path, body, servers=servers, headers=wrong, environment=LOCKED)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert servers.seen == []  # nothing is computed
    assert one(config, path, body, headers=right, environment=LOCKED).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/openapi.json", "/"])
def test_keys_lock_nothing_else(config: EndpointConfig, path: str) -> None:
    assert one(config, path, environment=LOCKED).status_code == 200


@pytest.mark.parametrize("path", ["/health/", "/v1/completions/", "/openapi.json/"])
@pytest.mark.parametrize("body", [None, ONE])
def test_nothing_leads_from_another_path_to_a_route(
    config: EndpointConfig, path: str, body: dict[str, Any] | None
) -> None:
    """A redirect would be to any Host that was sent, before that and the key are checked."""
    refused = one(config, path, body, headers={"Host": "evil.example"})
    assert (refused.status_code, "Location" in refused.headers) == (404, False)
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_the_schema_says_whether_a_key_is_needed(config: EndpointConfig) -> None:
    assert "security" not in one(config, "/openapi.json").json()
    locked = one(config, "/openapi.json", environment=LOCKED).json()
    [[name]] = locked["security"]
    assert name in locked["components"]["securitySchemes"]


@in_virtual_time
@pytest.mark.parametrize(("stream", "gaps"), [(True, 10), (False, 0)])
async def test_metrics_stand_beside_what_was_planned(
    config: EndpointConfig, gaps: int, *, stream: bool
) -> None:
    """An answer is measured exactly: tokens from the engine's count, one gap a chunk."""
    servers, limit = FakeServers(ttft_s=0.05, itl_s=0.002), {"MINICLUSTER_MAX_OUTPUT_TOKENS": "20"}
    async with visiting(config, servers, limit) as client:
        await client.post("/v1/completions", json={**ONE, "max_tokens": 11, "stream": stream})
        metrics, plan = (await client.get("/metrics")).text, (await client.get("/plan")).json()
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    seen = {name.removeprefix("minicluster_"): float(each) for name, each in lines.items()}
    sums_s = {"ttft": 0.05, "tpot": 0.002, "itl": 0.002 * gaps, "e2e": 0.07, "prefill": 0.0}
    counts = {"ttft": 1, "tpot": 1, "itl": gaps, "e2e": 1, "prefill": 1, "handoff": 1}
    expected = {
        **{f"{name}_seconds_sum": sum_s for name, sum_s in sums_s.items()},
        **{f"{name}_seconds_count": count for name, count in counts.items()},
        'tokens_total{kind="output"}': 11,
        'tokens_total{kind="prompt"}': 3,
        'planned_seconds{percentile="p99",quantity="ttft"}': 0.1,
        'planned_seconds{percentile="mean",quantity="prefill"}': 0.1,
        'planned_requests_per_second{kind="load"}': 1,
        'slo_seconds{quantity="ttft"}': 0.5,
        'replicas{domain="d0",kind="planned",role="decode"}': 1,
        'replicas{domain="d0",kind="running",role="decode"}': 1,
        'margin_seconds{quantity="ttft"}': 0.05,
        'margin_seconds{quantity="tpot"}': 0.005,
    }
    assert {name: seen[name] for name in expected} == pytest.approx(expected)
    assert 'ttft_seconds_bucket{le="0.5"}' in seen  # attainment is read off exactly
    measured, deployed = plan["measured"], plan["deployed"]
    assert (measured["ttft"]["p99_s"], measured["answers"]) == (pytest.approx(0.05), 1)
    assert measured["outcomes"] == {"ok": 1}
    assert measured["outstanding"] == {"prefill": 0, "all": 0}
    assert plan["planned"]["plan_hash"] == "cafe"
    assert "step_model" not in plan["planned"]
    assert (deployed["max_output_tokens"], deployed["admission"]) == (20, True)
    running = {"d0": {"planned": 1, "running": 1}}
    assert deployed["engines"]["decode"] == {"d0": {"tp": 1}}
    assert deployed["replicas"] == {"prefill": running, "decode": running}


def test_ready_says_what_is_lacking(config: EndpointConfig) -> None:
    """A pool without replicas, or a probe that fails: not ready, while the process is alive."""
    assert one(config, "/ready").json() == {"ready": True, "lacking": []}
    without = FakeServers(up={("prefill", "d0"): 0, ("decode", "d0"): 1})
    broken = FakeServers(ttft_s="no time")  # type: ignore[arg-type]
    for servers, lacking in ((without, "no prefill replica is up"), (broken, "a probe failed")):
        answer = one(config, "/ready", servers=servers)
        assert (answer.status_code, answer.json()["lacking"]) == (503, [lacking])
        assert one(config, "/health", servers=servers).status_code == 200


def test_the_page_loads_nothing_from_elsewhere(config: EndpointConfig) -> None:
    """One file, no address in it, and a policy under which only its own script runs."""
    answer = one(config, "/")
    assert "http" not in answer.text.replace("http-equiv", "")
    assert " src=" not in answer.text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "unsafe-inline" not in answer.headers["Content-Security-Policy"]


def test_phases_stand_beside_what_was_planned(config: EndpointConfig) -> None:
    """The hand-off is a sum of what is in the plan; mixed pools have no phases."""
    assert config.prediction is not None
    parts_s = {"prefill_queue": 20.0, "prefill": 3.4, "first_decode_step": 0.00078}
    split = replace(config, prediction=replace(config.prediction, ttft_parts_s=parts_s))
    planned = 'minicluster_planned_seconds{percentile="mean",quantity="'
    text = one(split, "/metrics").text
    for name, seconds in {"prefill_queue": 20.0, "prefill": 3.4, "handoff": 0.00078}.items():
        assert f'{planned}{name}"}} {seconds}' in text
    mixed = replace(split, pools=config.pools[1:])
    assert f'{planned}prefill"' not in one(mixed, "/metrics").text


def test_every_answer_of_simulated_engines_says_so(config: EndpointConfig) -> None:
    """Also a refusal, so that no tool takes what it times for a measurement."""
    simulated = SimulatedEngines(slowdown=8.0, text_tokens="bytes/4")
    assert "X-Minicluster-Engine" not in one(config, "/health").headers
    for path in ("/health", "/nothing-here", "/plan"):
        answer = one(replace(config, simulated=simulated), path)
        says = answer.headers["X-Minicluster-Engine"]
        assert says == "simulated; slowdown=8; text-tokens=bytes/4"
    assert answer.json()["planned"]["simulated"] == {"slowdown": 8.0, "text_tokens": "bytes/4"}


@in_virtual_time
async def test_a_prompt_that_decode_computed_has_no_prefill_phases(config: EndpointConfig) -> None:
    """And the measured rate is that of the answers: three in a second are two intervals."""
    async with visiting(config, FakeServers(ttft_s=0.5, path="local")) as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=ONE)).status_code == 200
        metrics, plan = (await client.get("/metrics")).text, (await client.get("/plan")).json()
    assert "minicluster_ttft_seconds_count 3.0" in metrics
    assert "minicluster_prefill_seconds_count 0.0" in metrics
    assert plan["measured"]["requests_per_s"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("more", "paces", "pace_s"), [({"max_tokens": 1}, 0, 0), ({"n": 2}, 1, 0.3)]
)
def test_the_pace_is_that_of_each_answer(
    config: EndpointConfig, more: dict[str, int], paces: int, pace_s: float
) -> None:
    """One token has none; four tokens of two answers, the last 0.3 s after the first, have one."""
    answer = one(config, "/v1/completions", ONE | more, servers=FakeServers(itl_s=0.1))
    metrics = answer.extensions["metrics"]
    assert answer.status_code == 200
    assert f"minicluster_tpot_seconds_count {float(paces)}" in metrics
    [sum_s] = re.findall(r"minicluster_tpot_seconds_sum (\S+)", metrics)
    assert float(sum_s) == pytest.approx(pace_s)


def test_engine_steps_are_those_of_an_interval(config: EndpointConfig) -> None:
    """The backend is asked for the interval; what is no time is refused with the parameter."""
    found = one(config, "/engine-steps?begin=5.5&end=20").json()
    assert found["columns"] == list(EngineStep._fields)
    assert found["steps"]["decode"][0][0] == 5.5
    for query, param in (("", "begin"), ("?begin=1", "end"), ("?begin=x&end=2", "begin"),
                         ("?begin=1&end=nan", "end"), ("?begin=1&end=inf", "end")):  # fmt: skip
        refused = one(config, f"/engine-steps{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
