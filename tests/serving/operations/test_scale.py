"""Scaling under load: requests are answered meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minicluster.errors import InputError, NegativeAnswer, TargetFailed
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Deployment, read_deployment, to_json
from serving.cluster.ports import free_ports
from serving.cluster.state import DEPLOYMENT, read_state
from serving.deployment.engine_args import SIMULATED
from serving.operations import scale as operations
from serving.operations.scale import replica_changes, scale
from serving.operations.status import Deployed, DeployedPool
from serving.protocol.app_spec import RayNode
from tests.full_disk import small_disk
from tests.serving.command import serving, serving_here
from tests.serving.deployed import Shared
from tests.serving.faults.load import Load, body_of, under_way
from tests.serving.plans import (
    deployed,
    make_deployment,
    make_plan,
    make_pool,
    make_state,
    places,
)

CLIENTS = 3
LONG = 1500
"""Tokens of an answer that takes a minute; planned are 10."""


@pytest.fixture
def three(deployment: Deployment) -> Deployment:
    """Return two prefill replicas and one decode replica; nodes of one machine share its cores."""
    two = places(("node-0", (0,)), ("node-1", (0,)))
    prefill = make_pool("prefill", replicas=2, placement=two)
    decode = make_pool("decode", placement=places(("node-0", (1,))))
    return replace(deployment, pools=(prefill, decode))


def test_what_shrinks_goes_first_within_the_plans_devices(three: Deployment) -> None:
    """A pool that grows takes what another one left, and nothing that was not planned."""
    found = replica_changes(three, three, {"decode": 2, "prefill": 1})
    assert [*found.items()] == [("prefill", 1), ("decode", 2)]
    assert replica_changes(three, three, {"decode": 1}) == {}
    for wanted, says in (({"decode": 2}, "at most the plan's 3"), ({"mixed": 1}, "mix")):
        with pytest.raises(InputError, match=says):
            replica_changes(three, three, wanted)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Have a cluster whose prefill replica on node-1 stays; return what is done to it."""
    done: list[object] = []

    def nodes(_state: object, role: str) -> list[Any]:
        """Return a head without devices, node-0, where prefill is free, and node-1."""
        labels = {ROLE_LABEL: role, NODE_LABEL: "node-0"}
        node_0 = {"Labels": labels, "Resources": {"CPU": 1}}
        node_1 = {"Labels": labels | {NODE_LABEL: "node-1"}, "Resources": {"CPU": 1}}
        head = {"Labels": labels, "Resources": {"node:__internal_head__": 1.0}}
        return [(head, {}), (node_0, {"CPU": int(role == "prefill")}), (node_1, {"CPU": 0})]

    stays = {"labels": {NODE_LABEL: "node-1"}, "cores": [[0]]}
    running = Deployed(pools={"prefill": DeployedPool(facts=[stays])}, answers=True)
    for name, replaced in {
        "role_nodes": nodes,
        "_deployment_name": lambda _state, role: role,
        "_set_replicas": lambda _state, *what: done.append(what[1:3]),
        "cluster_status": lambda *_, **__: running,
        "token_file": lambda _address: tmp_path / "token",
        "join_nodes": lambda found, *_, **__: done.extend(found),
        "stop": lambda mark, **_: done.append(mark),
    }.items():
        monkeypatch.setattr(operations, name, replaced)
    monkeypatch.chdir(tmp_path)
    return done


def test_a_device_changes_pools(events: list[object], three: Deployment) -> None:
    """The freed device gets a raylet labelled for its new pool, once the old one has ended."""
    state = deployed(make_plan(three))
    found = scale(state, {"decode": 2, "prefill": 1}, lambda _text: None)
    moved = RayNode(node="node-0", role="decode", cores=(0,), gpus=(), moved=True)
    mark = f"{state.cluster_id}-prefill-node-0"
    assert events == [("prefill", 1), mark, moved, ("decode", 2)]
    prefill, decode = read_deployment(DEPLOYMENT).pools
    assert (prefill.replicas, prefill.placement) == (1, places(("node-1", (0,))))
    assert (decode.replicas, decode.placement) == (2, places(("node-0", (1,)), ("node-0", (0,))))
    assert read_state() == found
    assert found.changes == (
        "pools[prefill].replicas: 1 instead of 2 (serving scale)",
        "pools[decode].replicas: 2 instead of 1 (serving scale)",
    )


def test_simulated_replicas_hold_no_device(events: list[object], three: Deployment) -> None:
    """No raylet starts or ends for them, and their places are the plan's first ones."""
    state = deployed(make_plan(three), target=SIMULATED)
    for wanted in ({"prefill": 1}, {"prefill": 2}):
        state = scale(state, wanted, lambda _text: None)
    assert [each for each in events if isinstance(each, RayNode)] == []
    assert [each for each in events if isinstance(each, tuple)] == [("prefill", 1), ("prefill", 2)]
    assert read_deployment(DEPLOYMENT).pool("prefill") == three.pool("prefill")
    assert not state.changes


def test_a_foreign_cluster_needs_a_free_node(
    events: list[object], three: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named with its labels; a free one of the role is taken, and nothing is started."""
    monkeypatch.setattr(operations, "token_file", lambda _address: None)
    monkeypatch.setattr(operations, "cluster_id_of", lambda _state: "")
    with pytest.raises(NegativeAnswer, match="minicluster-role=decode,minicluster-node=node-0"):
        scale(deployed(make_plan(three)), {"decode": 2, "prefill": 1}, lambda _text: None)
    scale(read_state() or make_state(), {"prefill": 2}, lambda _text: None)
    assert events == [("prefill", 1), ("prefill", 2)]


def test_what_cannot_be_recorded_is_not_done(
    events: list[object], three: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the cluster and its record stay as they are, and the command says why."""
    with small_disk(tmp_path) as disk:
        monkeypatch.chdir(disk.path)
        state = deployed(make_plan(three), ready=True)
        monkeypatch.setattr("serving.operations.status.cluster_processes", lambda _id: {1})
        with disk.full():
            done = serving_here(disk.path, "scale", "--apply", "--prefill", "1", "--decode", "2")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "No space left" in done.stderr
        assert (events, read_state(), read_deployment(DEPLOYMENT)) == ([], state, three)


def test_what_has_failed_can_be_asked_for_again(
    events: list[object], three: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a change that Ctrl-C interrupted, or that took too long, is as it was."""
    state, set_replicas = deployed(make_plan(three)), operations._set_replicas

    def interrupted(*_: object) -> None:
        assert read_deployment(DEPLOYMENT).pool("prefill").replicas == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "_set_replicas", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scale(state, {"prefill": 1}, lambda _text: None)
    assert (read_state(), read_deployment(DEPLOYMENT)) == (state, three)
    monkeypatch.setattr(operations, "_set_replicas", set_replicas)
    scale(state, {"prefill": 1}, lambda _text: None)
    assert events[0] == ("prefill", 1)


def test_a_deployment_that_was_taken_down_elsewhere_is_not_scaled(
    three: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another directory, by `serving down --address`: said in a line, with the way out."""
    from ray import serve  # noqa: PLC0415  (a second)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("serving.cluster.connection.connected", lambda _address: nullcontext())
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    with pytest.raises(TargetFailed, match="taken down elsewhere; `serving down` clears"):
        scale(deployed(make_plan(three), cluster_id=""), {"prefill": 1}, lambda _text: None)


def _data(place: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of `serving` that must succeed, and return what it printed as JSON."""
    done = serving(place, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.fixture
def place(tmp_path: Path, shared: Shared) -> Iterator[Path]:
    """Return a directory of our own, and leave nothing running there."""
    shared.end()
    yield tmp_path
    serving(tmp_path, "down")
    serving(tmp_path, "cluster", "down")


@pytest.mark.engine
@pytest.mark.campaign
def test_replicas_move_under_load(place: Path, demo_model: Path, three: Deployment) -> None:
    """On a labelled cluster: 2P1D, 1P2D and back, every request answered, however long."""
    plan = make_plan(replace(make_deployment(demo_model), pools=three.pools))
    cluster_spec = replace(plan.inputs.cluster, gpus_per_hb_domain=8)  # one for all nodes
    # Loose for a machine that starts engines meanwhile; a TPOT as planned, so that an answer is
    # long beyond all that was planned.
    plan = replace(plan, inputs=replace(plan.inputs, cluster=cluster_spec))
    plan = plan.under(slo=replace(plan.slo, ttft_s=8.0, tpot_s=None))
    (place / "plan.json").write_text(to_json(plan))
    assert serving(place, "cluster", "up", "plan.json").returncode == 0
    cluster = _data(place, "cluster", "status")
    assert [(row["role"], row["node"], row["alive"]) for row in cluster["raylets"]] == [
        ("prefill", "node-0", True),
        ("prefill", "node-1", True),
        ("decode", "node-0", True),
    ]
    port = free_ports(1)[0]
    up = serving(place, "up", "plan.json", "--address", cluster["address"], "--port", port)
    assert up.returncode == 0, up.stderr
    assert serving(place, "cluster", "down").returncode == 2  # something is deployed on it
    assert _data(place, "verify") == {"as_planned": True, "differences": [], "changes": []}
    base_url = f"http://127.0.0.1:{port}"
    with Load(base_url, CLIENTS, max_tokens=8) as load:
        for prefill, decode in ((1, 2), (2, 1)):
            # So many that all replicas work, each longer than all that was planned.
            number = 2 * CLIENTS if decode == 1 else 0
            bodies = [body_of(-1 - n, max_tokens=LONG) for n in range(number)]
            with under_way(base_url, bodies, timeout_s=600) as long:
                wanted = ("--prefill", prefill, "--decode", decode)
                done = serving(place, "scale", "--apply", *wanted)
                assert done.returncode == 0, done.stderr
                rows = {row["role"]: row["deployed"] for row in _data(place, "status")["pools"]}
                assert rows == {"prefill": prefill, "decode": decode}
                found = _data(place, "verify")
                assert found["differences"] == []
                assert bool(found["changes"]) == (prefill == 1)
            assert all(each.result().done for each in long)
    failed = [reply for reply in load.replies if not reply.done]
    print(f"\n{len(load.replies)} requests while pools were scaled, {len(failed)} failed")  # noqa: T201
    assert not failed
    for arguments, code in (
        (("scale", "--advise", "--window", "1"), 4),  # no more requests
        (("scale", "--apply", "--decode", "3"), 2),
        (("down",), 0),
        (("cluster", "down"), 0),
        (("cluster", "status"), 3),
    ):
        assert serving(place, *arguments).returncode == code, arguments
