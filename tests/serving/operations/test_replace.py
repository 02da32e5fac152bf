"""What `serving up --replace` refuses before it changes anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from minicluster.errors import InputError, NegativeAnswer, TargetFailed
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Plan, to_json
from serving.cluster.connection import connected
from serving.cluster.ports import NIXL_PORT, NIXL_PORTS
from serving.cluster.state import State
from serving.deployment.compile import hash_of
from serving.deployment.engine_args import SIMULATED, DeployTarget
from serving.deployment.target import Target
from serving.operations import replace as operations
from serving.operations.status import by_role
from serving.protocol.app_spec import RayNode, pool_prefix
from tests.serving.command import serving_here
from tests.serving.plans import deployed, make_pool, places

URL = "http://127.0.0.1:8123"


@pytest.fixture
def running(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Have the plan deployed from the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operations, "is_gone", lambda _state: False)
    monkeypatch.setattr("serving.operations.status.cluster_processes", lambda _id: {1})
    (tmp_path / "plan.json").write_text(to_json(plan))
    return deployed(plan, base_url=URL, ready=True, plan_hash=hash_of(plan))


def _up(place: Path, *options: str) -> tuple[int, str]:
    """Return exit code and last line of the command."""
    done = serving_here(place, "up", "plan.json", "--replace", *options)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


def test_the_plan_that_runs_is_nothing_to_do(running: State, tmp_path: Path) -> None:
    """With the port that it has, too."""
    same = (0, f"nothing to do: {URL} runs this plan")
    assert _up(tmp_path) == _up(tmp_path, "--port", "8123", "--engine", "vllm") == same
    assert running.deadlines_s == (None, None)


def test_without_a_deployment_there_is_nothing_to_replace(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(to_json(plan))
    code, said = _up(tmp_path)
    assert code == 3
    assert "nothing is deployed from this directory (`serving up plan.json`)" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "9000"), "--port is 9000; it has to be 8123 as it runs, with --replace"),
        (("--host", "0.0.0.0"), "--host is '0.0.0.0'; it has to be 127.0.0.1"),  # noqa: S104
        (("--engine", "simulated"), "--engine is 'simulated'; it has to be vllm"),
        (("--open",), "--open is 'given', but there can be no --open with --replace"),
    ],
)
@pytest.mark.usefixtures("running")
def test_what_clients_rely_on_stays(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    """Options that would change the endpoint are refused, and the way out is named."""
    code, line = _up(tmp_path, *options)
    assert code == 2
    assert said in line
    assert "`serving down`, then `serving up`" in line


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("model", InputError, "model.id is 'another'; it has to be demo, which clients"),
        ("devices", InputError, "it has to be a plan for cpu"),
        ("not ready", TargetFailed, "is not up"),
        ("gone", TargetFailed, "is not up"),
    ],
)
def test_another_model_and_other_devices_are_refused(
    plan: Plan,
    running: State,
    change: str,
    error: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = plan.deployment
    if change == "model":
        wanted = replace(wanted, model=replace(wanted.model, id="another"))
    elif change == "devices":
        wanted = replace(wanted, pools=(make_pool("mixed", gpu="h100-sxm"),))
    elif change == "gone":
        monkeypatch.setattr(operations, "is_gone", lambda _state: True)
    with pytest.raises(error, match=said):
        operations.refuse_replacement(replace(running, ready=change != "not ready"), wanted)


Room = Callable[..., list[RayNode]]


@pytest.fixture
def room(plan: Plan, running: State, target: Target, monkeypatch: pytest.MonkeyPatch) -> Room:
    """Return what finds the raylets to start where so many devices of each role are free."""

    def find(
        prefill: int,
        decode: int,
        *,
        wanted: Plan = plan,
        state: State = running,
        machine: Target = target,
    ) -> list[RayNode]:
        nodes = {
            role: {
                "Labels": {ROLE_LABEL: role, NODE_LABEL: "laptop"},
                "Alive": True,
                "free": {"CPU": free},
            }
            for role, free in (("prefill", prefill), ("decode", decode))
        }
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: [*nodes.values()]))
        for name, replaced in {
            "this_machine": lambda _kind, labels: replace(machine, labels=labels),
            "cluster_id_of": lambda state: state.cluster_id,
            "role_nodes": lambda _state, role: [(nodes[role], nodes[role]["free"])],
            "raylet_gpus": lambda _cluster_id: {1},
        }.items():
            monkeypatch.setattr(operations, name, replaced)
        given = DeployTarget(kind=state.target, generation=2)
        return operations._room(wanted.deployment, state, given)

    return find


def test_new_replicas_get_raylets_where_nothing_is_free(room: Room) -> None:
    """On a cluster of ours; labelled, so that they are not taken for those of the same node."""
    [started] = room(0, 1)
    assert (started.role, started.cores) == ("prefill", (0,))
    assert started.labels["minicluster-generation"] == "2"


def test_a_cluster_of_others_needs_free_devices(running: State, room: Room) -> None:
    theirs = replace(running, cluster_id="")
    assert room(1, 1, state=theirs) == []
    with pytest.raises(NegativeAnswer, match=r"1 devices are not free at .*=decode") as refused:
        room(1, 0, state=theirs)
    assert "beside what runs" in str(refused.value)


@pytest.mark.parametrize("kind", ["cpu", SIMULATED])
def test_memory_for_both_is_checked_first(
    running: State, target: Target, room: Room, kind: str
) -> None:
    machine = replace(target, memory_bytes=1 << 30)
    with pytest.raises(NegativeAnswer, match="memory: "):
        room(1, 1, state=replace(running, target=kind), machine=machine)


def test_gpus_of_running_replicas_are_refused(
    plan: Plan, running: State, target: Target, room: Room
) -> None:
    """Cores may be shared for the length of an upgrade, GPUs not."""
    pools = [
        make_pool(role, gpu="h100-sxm", placement=places(("laptop", (at,))))
        for at, role in enumerate(("prefill", "decode"))
    ]
    machine = replace(target, kind="gpu", num_gpus=2)
    wanted = replace(plan, pools=tuple(pools))
    with pytest.raises(NegativeAnswer, match=r"GPUs \[1\] have replicas that run"):
        room(0, 0, wanted=wanted, state=replace(running, target="gpu"), machine=machine)


@pytest.mark.parametrize(("generation", "port"), [(2, NIXL_PORT + NIXL_PORTS // 2), (3, NIXL_PORT)])
def test_generations_have_ports_of_their_own(
    plan: Plan, generation: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several hosts, which cannot be asked, they take turns; one host looks for free ones."""
    monkeypatch.setattr(operations, "free_nixl_port", lambda workers: 20_700 + workers)
    target = DeployTarget(kind="cpu", generation=generation)
    for hosts, expected in ((("a", "b"), port), (("a", "a"), 20_701)):
        nodes = [{"Alive": True, "NodeManagerAddress": host} for host in hosts]
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda found=nodes: found))
        assert operations._beside(plan.deployment, target).nixl_port == expected


def test_pools_are_found_by_their_generation() -> None:
    """While both run, and with several domains; the endpoint is no pool."""
    names = {
        pool_prefix(role, domain, generation) + "demo": (role, generation)
        for role in ("prefill", "decode", "mixed")
        for domain in ("", "d0", "d12")
        for generation in (1, 2, 13)
    }
    for generation in (1, 2, 13):
        found = by_role({**names, "Ingress": ("", generation)}, generation)
        assert found.keys() == {"prefill", "decode", "mixed"}
        for role, pools in found.items():
            assert [*pools.values()] == [(role, generation)] * 3


def test_a_connection_inside_another_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would refuse a second one; the outer block ends it."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: pytest.fail("the outer block goes on"))
    with connected("nowhere:1"):
        pass
