"""`serving up --replace` under load: no failed request, and no way to be left without a plan."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self
from urllib.request import urlopen

import pytest

from minicluster.plan import Plan, to_json
from minicluster.specs.lora import LoraSpec
from minicluster.specs.slo import SloSpec
from tests.plans import with_lora
from tests.serving.client import Reply, send
from tests.serving.command import LIMIT_S, SERVING, serving
from tests.serving.deployed import series, up
from tests.serving.faults.load import body_of
from tests.serving.faults.processes import processes
from tests.waiting import until

from .conftest import SLO, SLOWDOWN, answer_limits, plan_for_gpus
from .rounds import AnswerLimits, complaint
from .test_interrupts import interrupt

pytestmark = pytest.mark.simulated

INTERVAL_S = 0.3
STEADY_S = 3.0
"""For how long requests are sent before the upgrade."""

IMPATIENT = """
import sys
from serving.cli import main
from serving.operations import deploy
deploy.START_LIMIT_S = 0.0
main()
"""
"""The command `serving`, which gives engines no time to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request of the log: when it was sent, and what came of it."""

    at_s: float
    body: dict[str, Any]
    reply: Reply


class Steady:
    """Streams that begin at even intervals until the end of the block, and the log of them all."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._begun_s = time.monotonic()
        self._stop = threading.Event()
        self._sent: list[tuple[float, dict[str, Any], Future[Reply]]] = []
        self._clients = ThreadPoolExecutor(max_workers=64)
        self._sending = threading.Thread(target=self._send)

    def __enter__(self) -> Self:
        self._sending.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sending.join()
        self._clients.shutdown()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def log(self) -> list[Sent]:
        return [Sent(at_s=at, body=body, reply=each.result()) for at, body, each in self._sent]

    def _send(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            body = body_of(len(self._sent), tokens=50, max_tokens=20)
            at_s = self.now_s
            self._sent.append((at_s, body, self._clients.submit(send, self._url, body, 60)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The deployment that is upgraded, and the plan for it."""

    url: str
    place: Path
    other: Plan
    limits: AnswerLimits

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.place / ".minicluster/serving/state.json").read_text()
        )
        return found

    @property
    def answered_by(self) -> dict[str, tuple[str, str]]:
        """The replicas of prefill and decode that answered a request, by its id."""
        log = Path(self.state["session"]) / "session_latest/logs/serve/access.log"
        lines = map(json.loads, log.read_text().splitlines())
        return {
            line["request_id"]: (line["prefill_replica"], line["decode_replica"])
            for line in lines
            if "decode_replica" in line
        }

    def failed(self, log: list[Sent]) -> list[str]:
        """Return what was not answered, or with other tokens than those of its prompt."""
        ends = [(each.reply, complaint(each.body, each.reply, self.limits)) for each in log]
        return [wrong or str(reply) for reply, wrong in ends if wrong or not reply.done]

    def statuses(self, *models: str) -> list[int]:
        """Return the status of a request for each model, whose answer says its name."""
        found = []
        for model in models:
            body = body_of(900, tokens=50, max_tokens=2, stream=False) | {"model": model}
            reply = send(f"{self.url}/v1/completions", body, 60)
            assert reply.status != 200 or reply.body["model"] == model
            found.append(reply.status)
        return found

    def replicas(self) -> set[tuple[str, int]]:
        """Return role and process of every replica."""
        roles = ("prefill", "decode", "ingress")
        found = processes(self.state["cluster_id"])
        return {(each.role, each.pid) for each in found if each.role in roles}

    def await_roles(self, expected: Iterable[str]) -> None:
        """
        Wait until the roles of all replicas are those expected; fail after half a minute.

        A process may end a moment after Ray counts its actor as dead, which is what an upgrade
        waits for.
        """
        roles = sorted(expected)
        until(
            lambda: sorted(role for role, _ in self.replicas()) == roles,
            f"replicas of {roles}",
            limit_s=30.0,
        )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Running]:
    """
    Have one replica of each role up, and a plan of two for another SLO.

    A start that Ctrl-C interrupted twice right before leaves nothing that is in the way.
    """
    place = tmp_path_factory.mktemp("replaced")
    slo = SloSpec(ttft_s=1.5 * SLO.ttft_s, tpot_s=0.2)
    other = with_slots(plan_for_gpus(small_model, 2).under(slo=slo))
    (place / "other.json").write_text(to_json(other))
    options = ("--engine", "simulated", "--slowdown", str(SLOWDOWN), "--lora-modules", "red")
    plan = plan_for_gpus(small_model, 1)
    interrupt(place, plan, "replicas start", (signal.SIGINT, signal.SIGINT))
    with up(place, with_slots(plan), *options) as url:
        yield Running(url=url, place=place, other=other, limits=answer_limits(small_model))


def with_slots(plan: Plan) -> Plan:
    """Return the plan with a slot for two adapters."""
    lora = LoraSpec(
        max_loras=1, max_lora_rank=8, max_cpu_loras=2, adapters=2,
        host_bytes_per_s={"h100-sxm": 1e9},
    )  # fmt: skip
    return with_lora(plan, lora)


@pytest.fixture
def kept(running: Running) -> Iterator[Running]:
    """Check that what ran before the test runs on, alone, and has answered every stream."""
    state, replicas = running.state, running.replicas()
    with Steady(running.url) as load:
        yield running
    assert running.failed(load.log) == []
    assert running.state == state
    running.await_roles(role for role, _ in replicas)
    assert running.replicas() == replicas
    assert len(replicas) == 3


def _table(log: list[Sent], begin_s: float, end_s: float) -> str:
    """Return the log of an upgrade in figures: what clients saw before, during and after it."""
    lines = [
        f"upgrade of {end_s - begin_s:.1f} s, a stream every {INTERVAL_S} s; seconds of the clock",
        "| sent | requests | failed | first token p50, max | last token p50, max |",
        "|---|---|---|---|---|",
    ]
    parts = {"before": (0.0, begin_s), "during": (begin_s, end_s), "after": (end_s, math.inf)}
    for name, (low_s, high_s) in parts.items():
        replies = [each.reply for each in log if low_s <= each.at_s < high_s]
        firsts, ends = ([getattr(r, of) for r in replies] for of in ("first_s", "seconds"))
        lines.append(
            f"| {name} | {len(replies)} | {sum(not reply.done for reply in replies)} "
            f"| {median(firsts):.2f}, {max(firsts):.2f} | {median(ends):.2f}, {max(ends):.2f} |"
        )
    return "\n".join(lines)


def test_replicas_that_do_not_start_are_removed(kept: Running) -> None:
    """The command says so, with exit code 5."""
    command = [sys.executable, "-c", IMPATIENT, "up", "other.json", "--replace"]
    done = subprocess.run(
        command, cwd=kept.place, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 5, done.stderr
    assert "serving: not up after 0 s" in done.stderr.splitlines()[-1]
    assert "removing the new replicas; the running plan serves on" in done.stderr


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("starting engines", marks=pytest.mark.campaign),
        "probing",
        pytest.param("from the endpoint", marks=pytest.mark.campaign),
    ],
)
def test_ctrl_c_leaves_what_runs(kept: Running, moment: str) -> None:
    """However often it is pressed, at any moment before the switch."""
    said = kept.place / "interrupted.txt"
    command = ["env", "--default-signal=INT", *SERVING, "up", "other.json", "--replace"]
    with said.open("w") as out:
        started = subprocess.Popen(command, cwd=kept.place, stdout=out, stderr=out, process_group=0)
        until(lambda: moment in said.read_text() or started.poll() is not None, moment)
        for _ in range(2):
            os.killpg(started.pid, signal.SIGINT)
            time.sleep(0.2)
        assert started.wait(LIMIT_S) == 130, said.read_text()
    assert "Traceback" not in said.read_text()


def test_no_request_fails_while_a_plan_is_replaced(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Every stream ends with all its tokens, on replicas of one generation.

    Once the command has returned, the new ones alone run and answer, and the endpoint's limits,
    adapters, `verify`, `status` and `scale` are those of the new plan.
    """
    endpoint = {each for each in running.replicas() if each[0] == "ingress"}
    adapters = ("--lora-modules", "red", "--lora-modules", "blue")
    assert running.statuses("demo", "red", "blue") == [200, 200, 404]
    with Steady(running.url) as load:
        time.sleep(STEADY_S)
        begin_s = load.now_s
        done = serving(running.place, "up", "other.json", "--replace", *adapters)
        end_s = load.now_s
        running.await_roles(["decode", "decode", "ingress", "prefill", "prefill"])
        upgraded = running.replicas()
        scaled = serving(running.place, "scale", "--apply", "--prefill", "1")
        verified = serving(running.place, "verify")
    assert done.returncode == 0, done.stderr
    assert re.search("INFO|WARNING", done.stderr) is None, done.stderr
    with capsys.disabled():
        sys.stdout.write(f"\n{_table(load.log, begin_s, end_s)}\n")
    assert running.failed(load.log) == []
    assert running.statuses("red", "blue", "green") == [200, 200, 404]

    answered_by = running.answered_by
    pairs = [(each.at_s, *answered_by[each.reply.headers["x-request-id"]]) for each in load.log]
    [former] = {pair[1:] for pair in pairs if pair[0] < begin_s}
    assert all((prefill in former) == (decode in former) for _, prefill, decode in pairs)
    assert not any(decode in former for at_s, _, decode in pairs if at_s > end_s)
    assert len({pair[1:] for pair in pairs}) > 2, "both of the new replicas answer"

    assert endpoint <= upgraded, "the endpoint's process stays"
    found = series(running.url)
    ttft_s = running.other.slo.ttft_s * SLOWDOWN
    assert found['minicluster_slo_seconds{quantity="ttft"}'] == ttft_s
    assert found['minicluster_replicas{domain="d0",kind="planned",role="decode"}'] == 2
    total = found['minicluster_requests_total{outcome="ok",path="remote"}']
    assert total >= len(load.log), "the counts go on"
    with urlopen(f"{running.url}/plan", timeout=60) as answer:  # noqa: S310  (our own endpoint)
        assert json.load(answer)["planned"]["plan_hash"] == running.state["plan_hash"]
    assert scaled.returncode == 0, scaled.stderr
    assert "pools[prefill].replicas: 1 instead of 2" in verified.stdout, verified.stderr
