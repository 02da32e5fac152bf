from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from minicluster.plan import Deployment, to_json
from serving.api.access import KEYS_FILE
from serving.cluster.local_cluster import CLUSTER, numbered_nodes
from serving.cluster.logs import root_cause
from serving.cluster.raylets import ray_lines, raylet_mark
from serving.cluster.token import CERTIFICATES, TOKEN_PATH, USE_TLS
from serving.protocol.app_spec import RayNode
from tests.serving.command import serving_here


def test_no_cluster(tmp_path: Path) -> None:
    """Without one `down` has nothing to do; a file that is not ours is named."""
    down = serving_here(tmp_path, "cluster", "down")
    assert down.stdout == "no cluster was started from this directory\n"
    (tmp_path / CLUSTER).parent.mkdir(parents=True)
    (tmp_path / CLUSTER).write_text("{}")
    found = serving_here(tmp_path, "cluster", "status")
    assert (found.returncode, f"{CLUSTER} is" in found.stderr) == (2, True)


def test_numbered_nodes_take_both_roles() -> None:
    """Each node has a share for either role, told apart by labels alone."""
    nodes = numbered_nodes(2, 3)
    assert {tuple(sorted(node.labels.items())) for node in nodes} == {
        (("minicluster-node", f"node-{number}"), ("minicluster-role", role))
        for number in (0, 1)
        for role in ("prefill", "decode")
    }
    assert len({raylet_mark("x", node.labels) for node in nodes}) == 4


def _lines(place: Path, deployment: Deployment, *options: str) -> CompletedProcess[str]:
    (place / "deployment.json").write_text(to_json(deployment))
    return serving_here(place, "cluster", "lines", "deployment.json", *options)


def test_lines_for_hosts(tmp_path: Path, deployment: Deployment) -> None:
    """Each raylet has its line: the first is the head, the others join, all have their labels."""
    said = _lines(tmp_path, deployment, "--head", "10.0.0.1:7000").stdout.splitlines()
    head, other = (line for line in said if "ray start" in line)
    assert "--head --port=7000" in head
    assert "--address=10.0.0.1:7000" in other
    for line, role in ((head, "prefill"), (other, "decode")):
        assert f"--labels=minicluster-role={role},minicluster-node=laptop" in line
    up = said[-1]
    assert "serving up deployment.json --address 10.0.0.1:7000 --host 0.0.0.0" in up
    assert up.startswith(f"{KEYS_FILE}=")  # the endpoint needs a key
    shared = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/etc/minicluster-keys/ray-token "
    assert all(shared in line for line in (head, other, up))
    assert "(umask 077; openssl rand -hex 32 > /etc/minicluster-keys/ray-token)" in said


def test_lines_pass_on_what_is_set_here(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token path and certificates of this shell are those of every host, if they are there."""
    monkeypatch.setenv(TOKEN_PATH, "/my token")
    monkeypatch.setenv(USE_TLS, "1")
    refused = _lines(tmp_path, deployment)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{CERTIFICATES[0]} is missing" in refused.stderr
    for name in CERTIFICATES:
        (tmp_path / name).write_text("")
        monkeypatch.setenv(name, str(tmp_path / name))
    said = _lines(tmp_path, deployment).stdout
    passed_on = f"{TOKEN_PATH}='/my token' {USE_TLS}=1 {CERTIFICATES[0]}={tmp_path}/"
    assert said.count(passed_on) == 3  # two raylets, and `serving up`


def test_gpus_of_a_host_are_its_own() -> None:
    """A raylet on GPUs sees those of the plan, and no others."""
    node = RayNode(node="node-3", role="decode", cores=(), gpus=(4, 5))
    line = list(ray_lines([node], "h:1", "SHARED=1"))[-1]
    assert line.startswith("CUDA_VISIBLE_DEVICES=4,5 SHARED=1 ")
    assert "--num-gpus=2" in line


def test_the_root_cause_of_a_failed_start_is_named(tmp_path: Path) -> None:
    """The first error that reports no other one: of the workers' logs, or of Serve's message."""
    for message in ("deploying\n  TypeError: no\n", "TypeError:  no"):
        assert root_cause(tmp_path, message) == "TypeError: no"
    (tmp_path / "worker-a.err").write_text(
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    (tmp_path / "worker-b.out").write_text(
        "(Worker pid=3) ERROR 11-20 [x.py:1] ValueError: Available memory is less than requested\n"
        "(EngineCore pid=2) ERROR RuntimeError: WorkerProc initialization failed due to\n"
    )
    assert root_cause(tmp_path, "x") == "ValueError: Available memory is less than requested"
