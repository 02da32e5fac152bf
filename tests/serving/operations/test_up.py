"""What `serving up` refuses before anything is started, and what it lays over what runs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minicluster.errors import InputError, TargetFailed
from minicluster.plan import Plan, to_json
from serving.api.access import KEYS, KEYS_FILE, authorization, read_keys
from serving.cluster.ports import free_ports
from serving.cluster.state import HOME, State, read_state, write_state
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget
from serving.deployment.mapped_gpus import GPUS, read_gpus
from serving.deployment.target import Target
from serving.operations import deploy as operations
from serving.operations.deploy import Site
from serving.operations.probe import Readiness
from serving.protocol.app_spec import APP
from tests.serving.command import serving_here, taken_port
from tests.serving.plans import deployed, make_pool, make_state, places

CPU = DeployTarget(kind="cpu")


@pytest.mark.parametrize("options", [(), ("--host", "0.0.0.0", "--open")])  # noqa: S104
def test_a_port_in_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan, options: tuple[str, ...]
) -> None:
    """What a dead cluster left does not stand in the way, nor an open address: the port does."""
    host = options[1] if options else "127.0.0.1"
    monkeypatch.chdir(tmp_path)
    deployed(plan)
    (tmp_path / "plan.json").write_text(to_json(plan))
    with taken_port(host) as port:
        done = serving_here(tmp_path, "up", "plan.json", *options, "--port", port)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"--port is {port}; it has to be a port of {host} that is free" in done.stderr
    assert not [*HOME.iterdir()]


@pytest.fixture
def running(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Have the plan's deployment up to be measured, without a plan behind it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operations, "is_gone", lambda _state: False)
    return deployed(plan, nixl_port=20_100, planned=False, ready=True)


def _site(address: str | None = None, *, on: DeployTarget = CPU) -> Site:
    [port] = free_ports(1)
    return Site(target=on, host="127.0.0.1", port=port, address=address)


def _lay_over(plan: Plan, monkeypatch: pytest.MonkeyPatch, on: DeployTarget = CPU) -> Any:  # noqa: ANN401
    """Deploy *plan*; return the state that it starts from, and what is to be served."""
    seen: list[Any] = []

    def deploy(served: object, _site: Site, state: State, **_: object) -> None:
        seen.extend([state, served])
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "deploy", deploy)
    with pytest.raises(KeyboardInterrupt):
        operations.bring_up(plan.deployment, _site(on=on), report=lambda _: None, plan=plan)
    return seen


def test_a_new_deployment_has_a_cluster_and_ports_of_its_own(
    plan: Plan, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engines exchange KV caches by ports that nothing else has, prefill by the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operations, "this_machine", lambda *_: target)
    monkeypatch.setattr(operations, "free_nixl_port", lambda workers: 20_700 + workers)
    state, served = _lay_over(plan, monkeypatch)
    assert (state.nixl_port, state.address) == (20_701, "")
    assert len(state.cluster_id) == 16
    assert state.cluster_id[:8] in state.session
    assert not HOME.exists(), "interrupted before its start, it leaves nothing"
    [prefill] = served.of("prefill")
    ports = prefill.llm_config["experimental_configs"]
    assert ports["NIXL_SIDE_CHANNEL_PORT_BASE"] == 20_701


def _on_gpus(plan: Plan, share: float, *, numbers: int = 1) -> Plan:
    """Give each pool of *plan* so many GPUs of one node, in turn, and one engine on them."""
    pools = tuple(
        replace(
            pool,
            tp=numbers,
            placement=places(("node-0", tuple(range(at * numbers, (at + 1) * numbers)))),
            gpu="h200-sxm",
            ray_accelerator="H200",
        )
        for at, pool in enumerate(plan.deployment.pools)
    )
    engine = replace(plan.deployment.engine, gpu_memory_utilization=share)
    return replace(plan, pools=pools, engine=engine)


@pytest.mark.parametrize(
    ("share", "named"), [(0.4, "0,0"), (0.6, "0,0"), (0.6, "1,0"), (0.6, "0,1,0")]
)
def test_engines_share_a_gpu_that_is_named_twice(
    plan: Plan,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    named: str,
) -> None:
    """Each takes the plan's share of it; shares that together are more than a GPU are refused."""
    monkeypatch.chdir(tmp_path)
    machine = replace(target, kind="gpu", num_gpus=2)
    monkeypatch.setattr(operations, "this_machine", lambda *_: machine)
    shared = _on_gpus(plan, share)
    on = DeployTarget(kind="gpu", gpus=read_gpus({GPUS: named}))
    if (share, named) == (0.6, "0,0"):
        with pytest.raises(InputError, match=r"at most 0\.5: 2 GPUs of the plan are one"):
            operations.bring_up(shared.deployment, _site(on=on), report=lambda _: None)
        return
    state, served = _lay_over(shared, monkeypatch, on)
    assert state.gpus == on.gpus
    devices = {node.role: node.gpus for node in served.nodes}
    first, second, *_ = map(int, named.split(","))
    assert devices == {"prefill": (first,), "decode": (second,)}
    for pool in served.pools:
        assert pool.llm_config["engine_kwargs"]["gpu_memory_utilization"] == share


@pytest.mark.parametrize("text", ["all", "0;1", "-1", "0,,1", "0,"])
def test_gpus_are_numbers(text: str) -> None:
    """Anything else is refused, and names the variable."""
    with pytest.raises(InputError, match=GPUS):
        read_gpus({GPUS: text})


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ((0, 9), r"names GPUs \[9\]; it has to be of this machine's, which has 2"),
        ((0,), "one number for each of the plan's GPUs, of which the last is 1"),
        ((0, 0, 1, 1), r"different GPUs for the plan's \[0, 1\]"),
    ],
)
@pytest.mark.usefixtures("running")
def test_gpus_are_those_that_this_machine_has_and_engines_can_use(
    plan: Plan,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[int, ...],
    says: str,
) -> None:
    """Where a plan is laid over what runs, and where nothing does."""
    machine = replace(target, kind="gpu", num_gpus=2)
    monkeypatch.setattr(operations, "this_machine", lambda *_: machine)
    wanted = _on_gpus(plan, 0.4, numbers=max(1, len(gpus) // 2)).deployment
    site = _site(on=DeployTarget(kind="gpu", gpus=gpus))
    for gone in (False, True):
        monkeypatch.setattr(operations, "is_gone", lambda _state, gone=gone: gone)
        with pytest.raises(InputError, match=says):
            operations.bring_up(wanted, site, report=lambda _: None)


@pytest.mark.parametrize(("gpus", "named"), [((0, 0), ""), ((), "0,0")])
@pytest.mark.parametrize("words", [("up", "plan.json", "--replace"), ("scale",)])
def test_what_starts_raylets_of_its_own_refuses_such_gpus(
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[int, ...],
    named: str,
    words: tuple[str, ...],
) -> None:
    """Whether the variable is set, or was when the deployment was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("serving.operations.status.cluster_processes", lambda _id: {1})
    deployed(plan, target="gpu", ready=True, gpus=gpus)
    (tmp_path / "plan.json").write_text(to_json(plan))
    done = serving_here(tmp_path, *words, env={GPUS: named} if named else {})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{GPUS} is '0,0', but there can be no GPUs in place of the plan's" in done.stderr


def test_a_plan_takes_over_the_cluster_that_was_measured(
    plan: Plan, running: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cluster and side-channel ports stay those that run; the plan's limits come with it."""
    state, served = _lay_over(plan, monkeypatch)
    for name in ("cluster_id", "address", "nixl_port"):
        assert getattr(state, name) == getattr(running, name)
    assert served.endpoint.slo == plan.slo
    assert read_state() == running, "interrupted before the first change, it changes nothing"


def test_engines_of_plan_and_measurement_are_the_same(plan: Plan) -> None:
    """A plan changes what bounds queues, and nothing of what an engine is started with."""
    target = DeployTarget(kind="cpu", nixl_port=20_100)
    for pools in zip(
        *(compile_app(plan.deployment, target, plan=behind).pools for behind in (None, plan)),
        strict=True,
    ):
        before, after = (dict(pool.llm_config) for pool in pools)
        assert before.pop("deployment_config") != after.pop("deployment_config")
        assert before == after


@pytest.mark.parametrize("change", ["planned", "not ready", "model", "nodes", "routing"])
def test_anything_else_that_runs_is_not_replaced(
    plan: Plan, running: State, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment with a plan, or that differs in more than its plan, has to be taken down."""
    elsewhere = make_pool("decode", placement=places(("elsewhere", (1,))))
    others = {
        "model": {"inputs": replace(plan.inputs, model=replace(plan.model, id="another"))},
        "routing": {"routing": replace(plan.routing, policy="round-robin")},
        "nodes": {"pools": (plan.pools[0], elsewhere)},
    }
    write_state(replace(running, planned=change == "planned", ready=change != "not ready"))
    with pytest.raises(InputError, match="serving down"):
        _lay_over(replace(plan, **others.get(change, {})), monkeypatch)


def test_keys_do_not_stay_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of Ray and vLLM inherits it; a file that only its owner reads takes them."""
    monkeypatch.chdir(tmp_path)
    given = {KEYS: "alice:first-secret-0123456789:2,second-secret-0123456789", "HOME": "/"}
    keys, shown, environment = read_keys(given), authorization(given), dict(given)
    operations.move_keys(environment)
    assert environment.keys() == {KEYS_FILE, "HOME"}
    assert Path(environment[KEYS_FILE]).is_absolute()
    assert Path(environment[KEYS_FILE]).stat().st_mode & 0o777 == 0o600
    assert (read_keys(environment), authorization(environment)) == (keys, shown)
    for other in ({"HOME": "/"}, {**given, KEYS_FILE: "keys.toml"}):  # two formats are not mixed
        environment = dict(other)
        operations.move_keys(environment)
        assert environment == other


class Serve:
    """Ray Serve on a cluster that others started, as far as `serving up` calls it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, applications: list[str]) -> None:
        import ray  # noqa: PLC0415  (a second)
        from ray import serve  # noqa: PLC0415

        from serving.replicas import app  # noqa: PLC0415

        self.applications, self.calls = dict.fromkeys(applications), list[str]()
        self.owner: str | None = None
        connection = "serving.cluster.connection"
        monkeypatch.setattr(f"{connection}.connected", lambda _address: nullcontext())
        monkeypatch.setattr(f"{connection}.instance_of", lambda _address: "session_1")
        monkeypatch.setattr(ray, "nodes", list)
        monkeypatch.setattr(operations, "missing_nodes", lambda *_: ())
        monkeypatch.setattr(operations, "findings", lambda *_: ())
        monkeypatch.setattr(app, "build_app", lambda *_: None)
        monkeypatch.setattr(app, "owner_of", lambda _app: self.owner)
        monkeypatch.setattr(serve, "RunTarget", lambda *_, **__: None)
        monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=self._now()))
        for name in ("start", "run_many", "delete", "shutdown"):
            monkeypatch.setattr(serve, name, getattr(self, name))

    def _now(self) -> dict[str, None]:
        return dict(self.applications)

    def start(self, **_: object) -> None:
        self.calls.append("start")

    def run_many(self, *_: object, **__: object) -> None:
        self.calls.append("run_many")
        self.applications[APP] = None
        raise TargetFailed("the first engine did not start")

    def delete(self, name: str, **_: object) -> None:
        self.calls.append(f"delete {name}")
        del self.applications[name]

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.mark.parametrize(
    ("there", "calls"),
    [
        ([APP], []),
        ([], ["start", "run_many", f"delete {APP}", "shutdown"]),
        (["another"], ["start", "run_many", f"delete {APP}"]),
    ],
    ids=["refused", "failed", "beside another"],
)
def test_only_what_it_started_is_taken_down(
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    calls: list[str],
) -> None:
    """On a cluster of others, from a directory that knows of no deployment, and a failed start."""
    monkeypatch.chdir(tmp_path)
    cluster = Serve(monkeypatch, there)
    with pytest.raises((InputError, TargetFailed)) as failed:
        operations.bring_up(plan.deployment, _site("a:1"), report=lambda _: None, plan=plan)
    assert cluster.calls == calls
    assert ("serving down --address a:1" in str(failed.value)) == (not calls)
    assert read_state() is None


def test_a_deployment_that_comes_first_is_left_alone(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories deploy at once: the second finds the first when it is about to start."""
    monkeypatch.chdir(tmp_path)
    cluster = Serve(monkeypatch, [])

    def first(_deployment: object) -> None:
        cluster.applications[APP] = None

    given = {"report": print, "plan": plan, "before_start": first}
    with pytest.raises(InputError, match="down --address a:1"):
        operations.bring_up(plan.deployment, _site("a:1"), **given)
    assert cluster.calls == []
    assert APP in cluster.applications


@pytest.mark.parametrize("owner", ["us", "others"])
def test_what_has_replaced_it_is_not_taken_down(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """Another directory has deployed on the cluster where this one had."""
    monkeypatch.chdir(tmp_path)
    cluster = Serve(monkeypatch, [APP])
    cluster.owner = owner
    state = deployed(plan, cluster_id="", instance="session_1", owner="us")
    assert operations.take_down(state) == (owner == "us")
    assert (APP in cluster.applications) == (owner == "others")
    assert read_state() is None


NOTHING = {False: "nothing is deployed from this directory", True: "nothing is deployed at a:1"}


@pytest.mark.parametrize("options", [(), ("--address", "a:1")])
def test_down_clears_the_record_of_what_was_taken_down_elsewhere(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """By `serving down --address` in another directory, after which Ray Serve runs no more."""
    monkeypatch.chdir(tmp_path)
    cluster = Serve(monkeypatch, [])
    deployed(plan, cluster_id="", address="a:1", instance="session_1", owner="us", ready=True)
    for said in ("nothing of it runs any more; its record is removed", NOTHING[bool(options)]):
        done = serving_here(tmp_path, "down", *options)
        assert (done.returncode, done.stdout) == (0, f"{said}\n"), done.stderr
        assert read_state() is None
    assert set(cluster.calls) <= {"shutdown"}


def test_up_takes_the_place_of_what_was_taken_down_elsewhere(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = Serve(monkeypatch, [])
    deployed(plan, cluster_id="", address="a:1", instance="session_1", owner="us", ready=True)
    with pytest.raises(TargetFailed, match="the first engine did not start"):
        operations.bring_up(plan.deployment, _site("a:1"), report=lambda _: None, plan=plan)
    assert cluster.calls[:2] == ["start", "run_many"]


@pytest.mark.parametrize(("host", "code"), [("127.0.0.1", 0), ("localhost", 5)])
def test_down_clears_the_record_of_a_cluster_that_has_ended(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, code: int
) -> None:
    """One of this machine is gone; another host's may be out of reach, and the file is named."""
    monkeypatch.chdir(tmp_path)
    [port] = free_ports(1)
    deployed(plan, cluster_id="", address=f"{host}:{port}", instance="session_1", ready=True)
    done = serving_here(tmp_path, "down", env={"RAY_AUTH_TOKEN": "0" * 64, "HOME": str(tmp_path)})
    assert done.returncode == code, done.stderr
    assert (read_state() is None) == (code == 0)
    assert ("if it is gone for good, remove .minicluster/serving/state.json" in done.stderr) == (
        code == 5
    )


def test_the_cause_of_a_failed_start_is_not_hidden_by_its_end(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs that a full disk does not take are said in a line of their own, below the cause."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(to_json(plan))

    def deploy(_served: object, _site: Site, state: State, **_: object) -> None:
        write_state(state)
        raise TargetFailed("the first engine did not start")

    def take_down(_state: State) -> None:
        raise InputError("logs", "No space left", "room", "they stay in /there")

    monkeypatch.setattr(operations, "deploy", deploy)
    monkeypatch.setattr(operations, "take_down", take_down)
    monkeypatch.setattr(operations, "simulated_findings", lambda *_: ())
    done = serving_here(tmp_path, "up", "plan.json", "--port", "0", "--engine", "simulated")
    assert done.returncode == 5
    assert done.stderr.splitlines()[-2:] == [
        "serving: the first engine did not start",
        "logs is 'No space left'; it has to be room (they stay in /there)",
    ]


@pytest.mark.parametrize("keyed", [True, False])
def test_the_line_to_try_is_one_that_is_answered(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    """With keys it has a place for one, and shows none."""
    (tmp_path / "plan.json").write_text(to_json(plan))
    (tmp_path / "keys.txt").write_text("first-secret-0123456789")
    ready = make_state(ready=True), Readiness(ttft_s=None, handoff_s=0.1, stalls=0)
    monkeypatch.setattr(operations, "bring_up", lambda *_, **__: ready)
    file = {KEYS_FILE: str(tmp_path / "keys.txt")} if keyed else {}
    words = ("up", "plan.json", "--port", "0", "--engine", "simulated")
    said = serving_here(tmp_path, *words, env=file).stdout
    [line] = [each for each in said.splitlines() if each.startswith("try:")]
    assert ('-H "Authorization: Bearer $KEY" http' in line) == keyed
    assert "secret" not in said
