from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from loadtest.client.endpoint import VARIABLES
from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Deployable, Plan, plan_from, to_json
from serving.api.access import HOSTS, KEYS_FILE
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget
from serving.deployment.manifest import (
    FORMATS,
    HEAD_PROBE,
    compile_from_args,
    manifest_text,
    stop_s,
)
from serving.deployment.target import located
from serving.protocol.app_spec import APP, ServedApp
from tests.serving.command import serving_here, taken_port
from tests.serving.plans import places

ROOT = Path(__file__).parents[3]
SOURCE, THERE = ".minicluster/models/demo", "/models/demo"
"""Of the demo's model: here, and in the containers."""

BROKEN = Deployable(profile="x", rule_broken="pp = 2")


@pytest.fixture
def demo_plan(plan: Plan) -> Plan:
    """Return the demo's plan: its model named by a path that holds on this machine alone."""
    pools = tuple(
        replace(pool, placement=places(*(("node-0", each.gpus) for each in pool.placement)))
        for pool in plan.pools
    )
    inputs = replace(plan.inputs, model=replace(plan.model, source=SOURCE))
    return replace(plan, pools=pools, inputs=inputs)


def _text(plan: Plan, kind: str, *, open_access: bool = False) -> str:
    """Return what `serving manifest out/demo/plan.json --model /models/demo` writes."""
    file = Path("out/demo/plan.json")
    image = "minicluster:latest"
    return manifest_text(plan, file, kind, image=image, model=THERE, open_access=open_access)


def _documents(plan: Plan, kind: str) -> list[Any]:
    return [*yaml.safe_load_all(_text(plan, kind))]


def _services(plan: Plan) -> dict[str, Any]:
    [document] = _documents(plan, "compose")
    services: dict[str, Any] = document["services"]
    return services


def _served(plan: Plan, model: str = THERE) -> ServedApp:
    """Return what the plan is compiled to, on its own hosts."""
    target = DeployTarget(kind="cpu", one_host=False)
    return compile_app(located(plan.deployment, model), target, plan=plan)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, of pydantic
def test_ray_serve_takes_it(demo_plan: Plan) -> None:
    """Ray's own schema accepts the configuration, and its numbers are the compiled ones."""
    from ray.serve.schema import ServeDeploySchema  # noqa: PLC0415  (it warns)

    two = places(("node-0", (0,)), ("node-0", (2,)))
    prefill = replace(demo_plan.pools[0], replicas=2, placement=two)
    demo_plan = replace(demo_plan, pools=(prefill, demo_plan.pools[1]))
    [document] = _documents(demo_plan, "ray-serve")
    (application,) = ServeDeploySchema.model_validate(document).applications
    assert application.import_path == "serving.replicas.app:from_plan"
    assert (application.name, application.external_scaler_enabled) == (APP, True)
    for pool, deployment in zip(_served(demo_plan).pools, application.deployments, strict=True):
        compiled = pool.llm_config["deployment_config"]
        assert deployment.name == pool.name
        for option in deployment.model_fields_set - {"name"}:
            assert getattr(deployment, option) == compiled[option]


def test_kuberay_objects(demo_plan: Plan) -> None:
    """The RayService holds the same configuration, and a labelled group for each raylet."""
    config_map, policy, *_, service = _documents(demo_plan, "kuberay")
    assert plan_from(json.loads(config_map["data"]["plan.json"]), place="x") == demo_plan
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    [alone] = _documents(demo_plan, "ray-serve")
    args = alone["applications"][0]["args"] | {"plan": "/etc/minicluster/plan.json"}
    assert application == alone["applications"][0] | {"args": args}
    cluster = service["spec"]["rayClusterConfig"]
    assert (cluster["rayVersion"], cluster["authOptions"]) == ("2.60.0", {"mode": "token"})
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert {name: group["labels"] for name, group in groups.items()} == {
        f"{role}-node-0": {ROLE_LABEL: role, NODE_LABEL: "node-0"} for role in ("prefill", "decode")
    }
    for group in groups.values():
        # KubeRay refuses labels among the start parameters since 1.5, and wants all of these.
        assert "labels" not in group["rayStartParams"]
        assert group["minReplicas"] == group["maxReplicas"] == 1
    # The policy holds for each pod, and lets others to the endpoint alone.
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    own = policy["spec"]["podSelector"]["matchLabels"]
    for group in (cluster["headGroupSpec"], *groups.values()):
        assert own.items() <= group["template"]["metadata"]["labels"].items()
        paths = _mounts(group["template"]["spec"]).values()
        assert {"/etc/minicluster", THERE} <= {*paths}
    ours, operator, clients = policy["spec"]["ingress"]
    assert ours == {"from": [{"podSelector": {"matchLabels": own}}]}
    assert [each["port"] for each in operator["ports"]] == [8265, 52365]
    assert clients == {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_pods_are_confined_and_probed(demo_plan: Plan) -> None:
    """No pod is root or has a capability; one of each role stays; the head drains."""
    _, _, *budgets, service = _documents(demo_plan, "kuberay")
    cluster = service["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]["template"]
    pods = [head, *(group["template"] for group in cluster["workerGroupSpecs"])]
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["spec"]["containers"]
        expected = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == expected
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
        assert pod["spec"]["terminationGracePeriodSeconds"] == stop_s(_served(demo_plan))
    assert len(budgets) == len(pods)
    for budget, pod in zip(budgets, pods, strict=True):
        assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
        # KubeRay's pods have no scale, so that a budget is a number of pods that stay.
        assert budget["spec"]["minAvailable"] == 1
        selected = budget["spec"]["selector"]["matchLabels"]
        assert selected == pod["metadata"]["labels"]
    (container,) = head["spec"]["containers"]
    paths = [container[name]["exec"]["command"][-1] for name in ("livenessProbe", "readinessProbe")]
    assert paths == ["/health", "/ready"]
    assert "serving down --address" in container["lifecycle"]["preStop"]["exec"]["command"][-1]


@pytest.mark.parametrize(
    ("status", "code"),
    [(200, 0), (404, 0), (503, 1), (None, 0)],
    ids=["ok", "no app", "no", "none"],
)
def test_the_probe_of_the_head(status: int | None, code: int) -> None:
    """A head on which nothing is deployed yet is ready: KubeRay waits for that to deploy."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" and status else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        script = HEAD_PROBE.format(port=server.server_port)
        if status is None:
            server.socket.close()
        else:
            Thread(target=server.handle_request).start()
        done = subprocess.run([sys.executable, "-c", script, "/ready"], check=False)
    assert done.returncode == code


def _mounts(pod: dict[str, Any]) -> dict[str, str]:
    """Return the paths of a pod's volumes, each of which is mounted."""
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    return mounts


def test_gpus_of_kubernetes_and_compose(plan: Plan) -> None:
    pools = tuple(replace(pool, gpu="h100-sxm") for pool in plan.pools)
    gpu = replace(plan.inputs.gpu, name="h100-sxm", kind="gpu", vendor="nvidia")
    plan = replace(plan, pools=pools, inputs=replace(plan.inputs, gpu=gpu))
    *_, service = _documents(plan, "kuberay")
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    reserved = _services(plan)["decode-laptop"]["deploy"]["resources"]["reservations"]
    devices = {"driver": "nvidia", "device_ids": ["1"], "capabilities": ["gpu"]}
    assert reserved["devices"] == [devices]


def test_the_shipped_compose_file_is_what_is_written(demo_plan: Plan, tmp_path: Path) -> None:
    """docker-compose.yml is the demo's, open to this machine, unedited; its files are there."""
    shipped = ROOT / "docker-compose.yml"
    assert shipped.read_text() == _text(demo_plan, "compose", open_access=True)
    services = yaml.safe_load(shipped.read_text())["services"]
    mounted = {each.partition(":")[0] for one in services.values() for each in one["volumes"]}
    ours = {path for path in mounted if path.startswith("./monitoring")}
    assert len(ours) == 3
    assert all((ROOT / path).exists() for path in ours)
    (tmp_path / "locked.yml").write_text(_text(demo_plan, "compose"))
    for file in (shipped, tmp_path / "locked.yml"):
        schema = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
        command = [Path(sys.executable).parent / schema[0], *schema[1:], file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_containers_are_confined(demo_plan: Plan) -> None:
    """No service is root or has a capability, and Grafana has a password of this machine's own."""
    [document] = _documents(demo_plan, "compose")
    for name, service in document["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name != "prometheus":  # its image has a user of its own
            assert service["user"] == "${MINICLUSTER_USER:-1000:1000}", name
    services = document["services"]
    for name in ("head", "prefill-node-0", "decode-node-0"):
        assert services[name]["init"]
        assert services[name]["ulimits"]["nofile"]["soft"] >= 65536
    # What depends on others is stopped first: the head drains while the engines are there.
    assert {*services["head"]["depends_on"]} == {"prefill-node-0", "decode-node-0"}
    drains_s = [
        pool.llm_config["deployment_config"]["graceful_shutdown_timeout_s"]
        for pool in _served(demo_plan).pools
    ]
    assert float(services["head"]["stop_grace_period"][:-1]) > min(300, max(drains_s))
    assert "prometheus:/prometheus" in services["prometheus"]["volumes"]
    assert "prometheus" in document["volumes"]
    grafana = services["grafana"]
    assert not any("ANONYMOUS" in each for each in grafana["environment"])
    file = grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert file == f"/run/secrets/{grafana['secrets'][0]}"
    assert grafana["secrets"][0] in document["secrets"]
    last = (ROOT / "Dockerfile").read_text().rpartition("\nUSER ")[2]
    assert last.startswith("minicluster\n")


def test_the_head_finds_the_model_where_it_is_mounted(
    tmp_path: Path, demo_plan: Plan, small_model: Path
) -> None:
    """The plan as it was written, by the head's own command: the model of its containers is it."""
    file, place = tmp_path / "plan.json", tmp_path / "container"
    file.write_text(to_json(demo_plan))
    place.mkdir()
    text = manifest_text(demo_plan, file, "compose", image="x", model=str(small_model))
    head = yaml.safe_load(text)["services"]["head"]
    mounted = [volume.split(":")[-2] for volume in head["volumes"]]
    assert mounted == ["/etc/minicluster/plan.json", str(small_model)]
    told = shlex.split(head["command"][-1].partition("serving up ")[2])
    model = told[told.index("--model") + 1]
    with taken_port() as port:
        done = serving_here(place, "up", file, "--model", model, "--port", port)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"--port is {port}" in done.stderr


def test_the_cluster_takes_what_up_would(
    tmp_path: Path, demo_plan: Plan, small_model: Path
) -> None:
    """What `serve deploy` and KubeRay import is the plan, its model where it is on the hosts."""
    file = tmp_path / "plan.json"
    file.write_text(to_json(demo_plan))
    model = str(small_model)
    text = manifest_text(demo_plan, file, "ray-serve", image="x", model=model)
    (application,) = yaml.safe_load(text)["applications"]
    served = compile_from_args(application["args"], application["runtime_env"]["env_vars"])
    assert served == _served(demo_plan, model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": SOURCE}, "model.source: "),
        ({"plan": "no.json"}, "deployable: .* pp = 2"),
        ({"access": "keys"}, f"{KEYS_FILE}, a file of API keys"),
    ],
)
def test_the_cluster_refuses_what_up_would(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    demo_plan: Plan,
    small_model: Path,
    change: dict[str, str],
    says: str,
) -> None:
    """A plan that cannot be realised there, or that would be open unasked, is not built."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(to_json(demo_plan))
    (tmp_path / "no.json").write_text(to_json(replace(demo_plan, deployable=BROKEN)))
    good = {"plan": "plan.json", "model": str(small_model), "access": "open"}
    with pytest.raises((InputError, NegativeAnswer), match=says):
        compile_from_args(good | change, {})


def test_the_endpoint_needs_a_key_unless_open(tmp_path: Path, demo_plan: Plan) -> None:
    """Every format has a file of keys where the endpoint is, there alone; or says it is open."""
    [document] = _documents(demo_plan, "compose")
    assert document["secrets"]["minicluster-keys"] == {"file": "${KEYS:-./keys.txt}"}
    services = document["services"]
    assert services["head"]["environment"][KEYS_FILE] == "/run/secrets/minicluster-keys"
    holders = [
        name for name, each in services.items() if "minicluster-keys" in each.get("secrets", ())
    ]
    assert holders == ["head"]
    assert services["load"]["environment"] == {VARIABLES[0]: "${MINICLUSTER_API_KEY:-}"}
    *_, service = _documents(demo_plan, "kuberay")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    path = Path(application["runtime_env"]["env_vars"][KEYS_FILE])
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert _mounts(head)["keys"] == str(path.parent)

    opened = {kind: _text(demo_plan, kind, open_access=True) for kind in FORMATS}
    assert "environment" not in yaml.safe_load(opened["compose"])["services"]["load"]
    for text in opened.values():
        assert "keys.txt" not in text
        assert KEYS_FILE not in text
    (tmp_path / "plan.json").write_text(to_json(demo_plan))
    said = serving_here(tmp_path, "manifest", "plan.json", "--format", "ray-serve", "--open").stdout
    assert "access: open\n" in said
    assert f"{HOSTS}: {APP}-serve-svc" in said
