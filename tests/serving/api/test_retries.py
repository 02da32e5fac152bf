"""Domains and replicas that are gone: no request goes where none answers, and one attempt more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from serving.admission.controller import AdmissionController, InflightRequest
from serving.protocol.messages import ENGINE_DIED, NO_ANSWERING_REPLICA, EndpointConfig, Refusal
from serving.request.cost import RequestCost
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import ONE, one, visiting
from tests.serving.virtual_time import in_virtual_time

COMPLETIONS = "/v1/completions"
ASKED = RequestCost(prompt_tokens=40, output_tokens=10)


@pytest.fixture
def two(config: EndpointConfig) -> EndpointConfig:
    """Return a plan of two domains with a replica of each role."""
    pools = tuple(replace(pool, replicas={"d0": 1, "d1": 1}) for pool in config.pools)
    pairing = {"d0": ("d0", "d1"), "d1": ("d1", "d0")}
    return replace(config, pools=pools, pairing=pairing)


def _up(**decode: int) -> dict[tuple[str, str], int]:
    """Return the replicas that run: of prefill one in each domain."""
    return {("prefill", domain): 1 for domain in decode} | {
        ("decode", domain): count for domain, count in decode.items()
    }


def _admitted(admission: AdmissionController) -> str:
    found = admission.admit(ASKED)
    assert isinstance(found, InflightRequest)
    return found.domain


def test_a_dead_domain_attracts_no_request(two: EndpointConfig) -> None:
    """It has none in flight, as an idle one; it is chosen again when it is back."""
    admission = AdmissionController(two, seed=1, sheds=False)
    admission.inflight.set_replicas(_up(d0=0, d1=1))
    assert {_admitted(admission) for _ in range(50)} == {"d1"}
    admission.inflight.set_replicas(_up(d0=1, d1=1))
    assert Counter(_admitted(admission) for _ in range(50))["d0"] == 50
    admission.inflight.set_replicas(_up(d0=0, d1=0))
    assert {_admitted(admission) for _ in range(50)} == {"d0", "d1"}


@pytest.mark.parametrize("local", [True, False])
def test_a_request_that_moves_is_counted_where_it_is(two: EndpointConfig, *, local: bool) -> None:
    """All that it had in one domain it has in the other; nothing is left at its end."""
    admission = AdmissionController(two, seed=1)
    found = admission.admit(replace(ASKED, local=local))
    assert isinstance(found, InflightRequest)
    first = found.domain
    before, idle = admission.inflight.load(first), AdmissionController(two).inflight.load(first)
    assert (before.decode.per_token_s > 0) == local
    admission.move(found)
    assert {first, found.domain} == {"d0", "d1"}
    assert admission.inflight.load(first) == idle
    assert admission.inflight.load(found.domain) == before
    admission.first_token(found, 0.1)
    admission.end(found, 0.01)
    assert [admission.inflight.load(at) for at in ("d0", "d1")] == [idle] * 2


@in_virtual_time
@pytest.mark.parametrize(("path", "learns"), [("remote", True), ("fallback-local", False)])
async def test_times_of_another_path_teach_nothing(
    config: EndpointConfig, path: str, *, learns: bool
) -> None:
    """Of answers 0.4 s after their requests, 20 ms of which were forecast."""
    async with visiting(config, FakeServers(ttft_s=0.4, path=path)) as client:
        for _ in range(25):
            await client.post(COMPLETIONS, json=ONE)
        measured = (await client.get("/plan")).json()["measured"]
    assert measured["margin"]["ttft_s"] == pytest.approx(0.38 if learns else 0.05, abs=0.01)


@dataclass
class Dying(FakeServers):
    """Servers that refuse the first of so many attempts, after *spent_s*."""

    attempts: int = 1
    failure: Refusal = NO_ANSWERING_REPLICA
    spent_s: float = 0.0

    async def items(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[Any] | None = None
    ) -> AsyncGenerator[Any]:
        self.attempts -= 1
        if self.attempts >= 0:
            self.seen.append(domain)  # type: ignore[arg-type]
            await asyncio.sleep(self.spent_s)
            yield self.failure
            return
        assert tried is not None
        async for item in super().items(domain, kind, body, tried):
            yield item


TOO_LATE = Refusal(status=504, message="Too late.", code="kv-wait-timeout", retry_after_s=5.0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("attempts", "failure", "spent_s", "status"),
    [
        (1, NO_ANSWERING_REPLICA, 0.0, 200),
        (1, ENGINE_DIED, 0.5, 200),
        (2, ENGINE_DIED, 0.0, 503),  # once, not for ever
        (1, NO_ANSWERING_REPLICA, 3600.0, 503),  # there is no time left for another attempt
        (1, TOO_LATE, 0.0, 504),  # nothing is gone: it would be late elsewhere too
        (1, replace(TOO_LATE, status=400), 0.0, 400),
    ],
)
def test_a_replica_that_is_gone_before_the_first_token_is_replaced(
    two: EndpointConfig,
    attempts: int,
    failure: Refusal,
    spent_s: float,
    status: int,
    stream: bool,  # noqa: FBT001
) -> None:
    """By one of another domain, and the answer says so."""
    up = _up(d0=1, d1=1)
    servers = Dying(attempts=attempts, failure=failure, spent_s=spent_s, up=up)

    answer = one(two, COMPLETIONS, {**ONE, "stream": stream}, servers=servers)
    metrics = answer.extensions["metrics"]
    assert answer.status_code == status
    if status == 200:
        assert answer.headers["X-Minicluster-Path"] == "retried; reason=decode-failed"
        assert 'minicluster_fallbacks_total{reason="decode-failed"} 1.0' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 0.0' in metrics


@in_virtual_time
async def test_one_of_two_domains_dead_costs_no_request(two: EndpointConfig) -> None:
    """Neither before the endpoint knows of it, nor after; `/ready` says both."""
    up = _up(d0=0, d1=1)
    servers = FakeServers(up=up, refusal=NO_ANSWERING_REPLICA, refuses="d0", ttft_s=0.01)
    async with visiting(two, servers) as client:
        asked = [client.post(COMPLETIONS, json=ONE) for _ in range(40)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert (await client.get("/ready")).status_code == 200
        strict = await client.get("/ready?all=1")
        assert (strict.status_code, strict.json()["ready"]) == (503, False)


def test_without_any_replica_a_request_is_refused_at_once(config: EndpointConfig) -> None:
    answer = one(config, COMPLETIONS, ONE, servers=FakeServers(refusal=NO_ANSWERING_REPLICA))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert answer.headers["Retry-After"]
