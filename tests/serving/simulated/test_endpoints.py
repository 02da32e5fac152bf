"""Two endpoint processes and one gate on simulated engines: what dies takes nothing with it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from minicluster.plan import Plan, to_json
from minicluster.specs.slo import SloSpec
from tests.serving.client import Reply, send
from tests.serving.command import serving
from tests.serving.deployed import outstanding, series, up
from tests.serving.faults.load import Load, body_of, under_way
from tests.serving.faults.processes import Process, kill, processes
from tests.waiting import until

from .conftest import SLO, answer_limits, plan_for_gpus
from .rounds import AnswerLimits, complaint
from .test_replace import Steady

pytestmark = pytest.mark.simulated

ENDPOINTS = 2
STREAMS = 40
SHORT: dict[str, Any] = {"tokens": 50, "max_tokens": 4}
BACK_S = 60.0
"""Within which Ray Serve has started what was killed, on a busy machine too; it takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """The deployment, and a plan that may take its place."""

    url: str
    place: Path
    limits: AnswerLimits

    @property
    def state(self) -> dict[str, Any]:
        file = self.place / ".minicluster/serving/state.json"
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def find(self, role: str) -> list[Process]:
        return [each for each in processes(self.state["cluster_id"]) if each.role == role]

    def held_by(self, endpoint: Process) -> int:
        """Return the number of connections that an endpoint process has accepted."""
        return len(self._sockets(endpoint, psutil.CONN_ESTABLISHED))

    def listening(self) -> set[int]:
        """Return the endpoint processes that listen at the port."""
        return {
            each.pid for each in self.find("ingress") if self._sockets(each, psutil.CONN_LISTEN)
        }

    def _sockets(self, endpoint: Process, status: str) -> list[Any]:
        port = int(self.url.rpartition(":")[2])
        try:
            found = psutil.Process(endpoint.pid).net_connections("tcp")
        except psutil.Error:  # it has just ended
            return []
        return [each for each in found if each.laddr.port == port and each.status == status]

    def wait_until(self, requests: int) -> None:
        """Wait until the gate counts so many requests."""
        until(lambda: outstanding(self.url) == requests, f"{requests} requests in flight")

    def ends(self, bodies: list[dict[str, Any]], streams: list[Future[Reply]]) -> list[str]:
        """Return what is wrong with each stream, when it has ended."""
        return [self.wrong(body, each.result()) for body, each in zip(bodies, streams, strict=True)]

    def wrong(self, body: dict[str, Any], reply: Reply) -> str:
        """Say what is wrong with an answer; empty: it is whole."""
        return complaint(body, reply, self.limits) or ("" if reply.done else str(reply))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Deployed]:
    """Have two endpoints up, and one replica of each role that answers many requests at once."""
    place = tmp_path_factory.mktemp("endpoints")
    other = _wide(plan_for_gpus(small_model, 1)).under(
        slo=SloSpec(ttft_s=2 * SLO.ttft_s, tpot_s=0.2)
    )
    (place / "other.json").write_text(to_json(other))
    options = ("--engine", "simulated", "--endpoints", str(ENDPOINTS))
    plan = _wide(plan_for_gpus(small_model, 1))
    with up(place, plan, *options, MINICLUSTER_ADMISSION="off") as url:
        found = Deployed(url=url, place=place, limits=answer_limits(small_model))
        assert len(found.listening()) == ENDPOINTS
        yield found


def _wide(plan: Plan) -> Plan:
    """Return the plan with replicas that decode all streams at once."""
    pools = tuple(replace(pool, max_num_seqs=2 * STREAMS) for pool in plan.pools)
    return replace(plan, pools=pools)


def _is_gone(process: Process) -> bool:
    """Return whether a process has ended, so that no connection can come to it."""
    try:
        return bool(psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_an_endpoint_that_is_killed_takes_its_own_streams_alone(deployed: Deployed) -> None:
    """
    The others are whole, new connections are answered at once, and the gate gives all back.

    Ray Serve starts another one, which listens at the same port.
    """
    bodies = [body_of(seed, tokens=50, max_tokens=80) for seed in range(STREAMS)]
    with under_way(deployed.url, bodies) as streams:
        deployed.wait_until(STREAMS)
        victim, other = deployed.find("ingress")
        lost = deployed.held_by(victim)
        assert lost + deployed.held_by(other) == STREAMS
        assert lost > 0
        kill(victim)
        until(lambda: _is_gone(victim), "its sockets are closed")
        new = [body_of(900 + number, **SHORT) for number in range(8)]
        answers = [send(f"{deployed.url}/v1/completions", body) for body in new]
        assert outstanding(deployed.url) <= STREAMS - lost
    assert [deployed.wrong(*each) for each in zip(new, answers, strict=True)] == [""] * len(new)
    assert max(each.first_s for each in answers) < deployed.limits.first_s / 2
    ends = deployed.ends(bodies, streams)
    assert len([end for end in ends if end]) == lost, ends
    deployed.wait_until(0)
    until(lambda: len(deployed.listening()) == ENDPOINTS, "there is a second one again", BACK_S)
    assert other.pid in deployed.listening()


def test_a_gate_that_is_killed_is_not_noticed_by_any_client(deployed: Deployed) -> None:
    """Streams go on, requests wait for the next gate, and it counts what is in flight."""
    bodies = [body_of(2000 + seed, tokens=50, max_tokens=400) for seed in range(6)]
    [gate] = deployed.find("gate")
    with under_way(deployed.url, bodies) as streams:
        deployed.wait_until(len(bodies))
        with Load(deployed.url, 6, **SHORT) as load:
            time.sleep(1.0)
            killed_s, before = time.monotonic(), len(load.replies)
            kill(gate)
            until(lambda: len(load.replies) > before + 6, "requests are answered again", BACK_S)
            away_s = time.monotonic() - killed_s
            time.sleep(1.0)
        assert not any(each.done() for each in streams)
        deployed.wait_until(len(bodies))
    [successor] = deployed.find("gate")
    assert successor.pid != gate.pid
    assert [reply for reply in load.replies if not reply.done] == [], away_s
    assert deployed.ends(bodies, streams) == [""] * len(bodies)
    deployed.wait_until(0)
    assert series(deployed.url)['minicluster_outstanding_requests{stage="prefill"}'] == 0


def test_an_endpoint_that_is_ended_is_not_noticed_by_any_client(deployed: Deployed) -> None:
    """At SIGTERM its streams end first, and the other one has all that is new."""
    bodies = [body_of(3000 + seed, tokens=50, max_tokens=60) for seed in range(STREAMS)]
    ended, other = deployed.find("ingress")
    with under_way(deployed.url, bodies) as streams:
        deployed.wait_until(STREAMS)
        os.kill(ended.pid, signal.SIGTERM)
        until(lambda: deployed.listening() == {other.pid}, "one listens alone")
        new = [body_of(3900 + number, **SHORT) for number in range(8)]
        answers = [send(f"{deployed.url}/v1/completions", body) for body in new]
    assert [deployed.wrong(*each) for each in zip(new, answers, strict=True)] == [""] * len(new)
    assert deployed.ends(bodies, streams) == [""] * STREAMS
    deployed.wait_until(0)
    until(lambda: len(deployed.listening()) == ENDPOINTS, "there is a second one again", BACK_S)


def test_a_gate_that_is_ended_has_a_successor(deployed: Deployed) -> None:
    """At SIGTERM it leaves its endpoints, whose streams and clients do not notice."""
    bodies = [body_of(4000 + seed, tokens=50, max_tokens=30) for seed in range(4)]
    [gate] = deployed.find("gate")
    with Load(deployed.url, 6, **SHORT) as load, under_way(deployed.url, bodies) as streams:
        time.sleep(1.0)
        os.kill(gate.pid, signal.SIGTERM)
        until(lambda: _is_gone(gate), "it has ended", BACK_S)
        before = len(load.replies)
        until(lambda: len(load.replies) > before + 6, "requests are answered again", BACK_S)
    assert [reply for reply in load.replies if not reply.done] == []
    assert deployed.ends(bodies, streams) == [""] * len(bodies)
    deployed.wait_until(0)


def test_no_request_fails_while_a_plan_is_replaced_behind_two_endpoints(deployed: Deployed) -> None:
    """Both take the new plan at once; their processes and that of the gate stay."""
    before = {each.pid for role in ("gate", "ingress") for each in deployed.find(role)}
    with Steady(deployed.url) as load:
        done = serving(deployed.place, "up", "other.json", "--replace")
        time.sleep(1.0)
    assert done.returncode == 0, done.stderr
    ends = [deployed.wrong(each.body, each.reply) for each in load.log]
    assert [end for end in ends if end] == []
    assert {each.pid for role in ("gate", "ingress") for each in deployed.find(role)} == before
    until(lambda: len(deployed.find("decode")) == 1, "the former replicas have ended", BACK_S)
    deployed.wait_until(0)
    plan_hash = deployed.state["plan_hash"]
    for _ in range(4 * ENDPOINTS):  # of each endpoint's connections
        with urlopen(f"{deployed.url}/plan", timeout=60) as answer:  # noqa: S310  (our own endpoint)
            assert json.load(answer)["planned"]["plan_hash"] == plan_hash
