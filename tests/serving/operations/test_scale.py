"""Scaling under load: requests are answered meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import Placement, to_json
from serving.cluster.ports import free_ports
from serving.cluster.state import State
from serving.operations.scale import replica_changes, scale
from tests.serving.client import Reply, send
from tests.serving.plans import make_deployment, make_plan, make_pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from minicluster.plan import Deployment
    from tests.serving.deployed import Shared

LIMIT_S = 600
CLIENTS = 3
LONG = 1500
"""Tokens of an answer that takes a minute; planned are 10."""


@pytest.fixture
def three(small_model: Path) -> Deployment:
    """Return two prefill replicas and one decode replica; nodes of one machine share its cores."""
    places = tuple(Placement(node=f"node-{number}", gpus=(0,)) for number in (0, 1))
    decode = make_pool("decode", placement=(Placement(node="node-0", gpus=(1,)),))
    return make_deployment(
        small_model, prefill=make_pool("prefill", replicas=2, placement=places), decode=decode
    )


def test_what_shrinks_goes_first(three: Deployment) -> None:
    """A pool that grows takes what another one left."""
    found = replica_changes(three, three, {"decode": 2, "prefill": 1})
    assert [(move.pool.role, move.replicas) for move in found] == [("prefill", 1), ("decode", 2)]
    assert replica_changes(three, three, {"decode": 1}) == ()


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"decode": 2}, "at most the plan's 3"),
        ({"prefill": 0}, "at least 1"),
        ({"mixed": 1}, "mix"),
    ],
)
def test_no_more_than_was_planned(three: Deployment, wanted: dict[str, int], says: str) -> None:
    """Devices stay those of the plan, and no pool goes empty."""
    with pytest.raises(InputError, match=says):
        replica_changes(three, three, wanted)


def test_a_substitution_is_not_scaled() -> None:
    """What was made smaller has none of the plan's devices to move."""
    state = State(
        cluster_id="x",
        address="127.0.0.2:1",
        base_url="http://127.0.0.1:1",
        target="cpu",
        plan="plan.json",
        plan_hash="0" * 16,
        session="",
        started="",
        deployment="deployment.json",
        changes=("pools[decode].tp: 2 instead of 8",),
    )
    with pytest.raises(NegativeAnswer, match="substituted"):
        scale(state, {"decode": 2}, lambda _text: None)


class Load:
    """Clients that ask one request after the other until told to stop."""

    def __init__(self, base_url: str) -> None:
        """Start them."""
        self._base_url = base_url
        self._ended = threading.Event()
        self.replies: list[Reply] = []
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        """Ask, with prompts that no cache has seen."""
        count = 0
        while not self._ended.is_set():
            count += 1
            prompt = [2361 + (7 * number + 13 * count + 29 * i) % 2000 for i in range(100)]
            body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "stream": True}
            self.replies.append(send(f"{self._base_url}/v1/completions", body))
            time.sleep(0.1)

    def stop(self) -> list[Reply]:
        """Wait for the last answers; return those that were none."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=120)
        return [reply for reply in self.replies if not reply.done]


def _long_answers(base_url: str, count: int) -> list[Future[Reply]]:
    """Ask for answers longer than all that was planned, so many that all replicas work."""
    asking = ThreadPoolExecutor(max(1, count))
    bodies = [
        {
            "model": "demo",
            "prompt": [2361 + 101 * n + i for i in range(100)],
            "max_tokens": LONG,
            "ignore_eos": True,
            "stream": True,
        }
        for n in range(count)
    ]
    url = f"{base_url}/v1/completions"
    futures = [asking.submit(send, url, body, LIMIT_S) for body in bodies]
    asking.shutdown(wait=False)
    return futures


class Shell:
    """A directory to type `serving` in."""

    def __init__(self, place: Path) -> None:
        """Keep the directory."""
        self._place = place

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command, whatever comes of it."""
        return subprocess.run(
            [sys.executable, "-m", "serving.cli", *arguments],
            cwd=self._place,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    def data(self, *arguments: str) -> dict[str, Any]:
        """Run a command that must succeed, and return what it printed as JSON."""
        done = self(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        data: dict[str, Any] = json.loads(done.stdout)
        return data


@pytest.fixture
def shell(tmp_path: Path, shared: Shared) -> Iterator[Shell]:
    """Return a place of our own, and leave nothing running there."""
    shared.end()
    shell = Shell(tmp_path)
    yield shell
    shell("down")
    shell("cluster", "down")


@pytest.mark.engine
@pytest.mark.campaign
def test_replicas_move_under_load(
    tmp_path: Path, shell: Shell, demo_model: Path, three: Deployment
) -> None:
    """On a labelled cluster: 2P1D, 1P2D and back, every request answered, however long."""
    deployment = replace(make_deployment(demo_model), pools=three.pools)
    plan = make_plan(deployment)
    cluster_spec = replace(plan.inputs.cluster, gpus_per_hb_domain=8)  # one for all nodes
    # Loose for a machine that starts engines meanwhile; a TPOT as planned, so that an answer is
    # long beyond all that was planned.
    plan = replace(plan, inputs=replace(plan.inputs, cluster=cluster_spec))
    plan = plan.under(slo=replace(plan.slo, ttft_s=8.0, tpot_s=None))
    (tmp_path / "plan.json").write_text(to_json(plan))
    assert shell("cluster", "up", "plan.json").returncode == 0
    cluster = shell.data("cluster", "status")
    assert [(row["role"], row["node"], row["alive"]) for row in cluster["raylets"]] == [
        ("prefill", "node-0", True),
        ("prefill", "node-1", True),
        ("decode", "node-0", True),
    ]
    port = str(free_ports(1)[0])
    up = shell("up", "plan.json", "--address", cluster["address"], "--port", port)
    assert up.returncode == 0, up.stderr
    assert shell("cluster", "down").returncode == 2  # something is deployed on it
    assert shell.data("verify") == {"as_planned": True, "differences": [], "changes": []}
    base_url = f"http://127.0.0.1:{port}"
    load = Load(base_url)
    try:
        for prefill, decode in ((1, 2), (2, 1)):
            long = _long_answers(base_url, 2 * CLIENTS if decode == 1 else 0)
            wanted = ("--prefill", str(prefill), "--decode", str(decode))
            done = shell("scale", "--apply", *wanted)
            assert done.returncode == 0, done.stderr
            rows = {row["role"]: row["deployed"] for row in shell.data("status")["pools"]}
            assert rows == {"prefill": prefill, "decode": decode}
            found = shell.data("verify")
            assert found["differences"] == []
            assert bool(found["changes"]) == (prefill == 1)
            assert all(each.result().done for each in long)
    finally:
        failed = load.stop()
    print(f"\n{len(load.replies)} requests while pools were scaled, {len(failed)} failed")  # noqa: T201
    assert not failed
    assert shell("scale", "--advise", "--window", "1").returncode == 4  # no more requests
    assert shell("scale", "--apply", "--decode", "3").returncode == 2
    assert shell("down").returncode == 0
    assert shell("cluster", "down").returncode == 0
    assert shell("cluster", "status").returncode == 3
