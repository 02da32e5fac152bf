from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import to_json
from serving.api.auth import KEYS_FILE
from serving.cluster.local_cluster import CLUSTER, current_cluster, numbered_nodes, read_cluster
from serving.cluster.raylets import ray_lines, raylet_mark
from serving.cluster.state import HOME
from serving.cluster.token import CERTIFICATES, TOKEN_PATH, USE_TLS
from serving.protocol.app_spec import RayNode
from tests.serving.plans import make_deployment

if TYPE_CHECKING:
    from pathlib import Path


def _cluster(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serving.cli", "cluster", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up",), "expected one of the two"),
        (("up", "plan.json", "--nodes", "2"), "expected one of the two"),
        (("up", "--nodes", "0"), "--nodes"),
        (("up", "missing.json"), "missing.json"),
    ],
)
def test_bad_usage(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """A cluster is of a plan or of a number of nodes, and nothing is started otherwise."""
    done = _cluster(tmp_path, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one `status` says no, `down` has nothing to do, and a file not ours is named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NegativeAnswer, match="no cluster was started"):
        current_cluster()
    assert _cluster(tmp_path, "down").stdout == "no cluster was started from this directory\n"
    HOME.mkdir(parents=True)
    CLUSTER.write_text("{}")
    with pytest.raises(InputError, match=r"cluster\.json"):
        read_cluster()


def test_numbered_nodes_take_both_roles() -> None:
    """Each node has a share for either role, told apart by labels alone."""
    nodes = numbered_nodes(2, 3)
    assert {tuple(sorted(node.labels.items())) for node in nodes} == {
        (("minicluster-node", f"node-{number}"), ("minicluster-role", role))
        for number in (0, 1)
        for role in ("prefill", "decode")
    }
    marks = {raylet_mark("x", node.labels) for node in nodes}
    assert len(marks) == 4


def test_lines_for_hosts(tmp_path: Path, small_model: Path) -> None:
    """Each raylet has its line: the first is the head, the others join, all have their labels."""
    (tmp_path / "deployment.json").write_text(to_json(make_deployment(small_model)))
    done = _cluster(tmp_path, "lines", "deployment.json", "--head", "10.0.0.1:7000")
    lines = [line for line in done.stdout.splitlines() if "ray start" in line]
    assert ["--head --port=7000" in line for line in lines] == [True, False]
    assert ["--address=10.0.0.1:7000" in line for line in lines] == [False, True]
    for line, role in zip(lines, ("prefill", "decode"), strict=True):
        assert f"--labels=minicluster-role={role},minicluster-node=laptop" in line
    up = done.stdout.splitlines()[-1]
    assert "serving up deployment.json --address 10.0.0.1:7000 --host 0.0.0.0" in up
    assert up.startswith(f"{KEYS_FILE}=")  # the endpoint needs a key
    shared = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/etc/minicluster-keys/ray-token "
    assert all(shared in line for line in [*lines, up])
    assert "(umask 077; openssl rand -hex 32 > /etc/minicluster-keys/ray-token)" in done.stdout


def test_lines_pass_on_what_is_set_here(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token path and certificates of this shell are those of every host, if they are there."""
    (tmp_path / "deployment.json").write_text(to_json(make_deployment(small_model)))
    monkeypatch.setenv(TOKEN_PATH, "/my token")
    monkeypatch.setenv(USE_TLS, "1")
    refused = _cluster(tmp_path, "lines", "deployment.json")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{CERTIFICATES[0]} is missing" in refused.stderr
    for name in CERTIFICATES:
        (tmp_path / name).write_text("")
        monkeypatch.setenv(name, str(tmp_path / name))
    done = _cluster(tmp_path, "lines", "deployment.json")
    lines = [line for line in done.stdout.splitlines() if " ray start " in line or "up" in line]
    starts = [line for line in lines if not line.startswith("#")]
    assert len(starts) == 3
    for line in starts:
        assert f"{TOKEN_PATH}='/my token' {USE_TLS}=1 {CERTIFICATES[0]}={tmp_path}/" in line


def test_gpus_of_a_host_are_its_own() -> None:
    """A raylet on GPUs sees those of the plan, and no others."""
    node = RayNode(node="node-3", role="decode", cores=(), gpus=(4, 5))
    line = list(ray_lines([node], "h:1", "SHARED=1"))[-1]
    assert line.startswith("CUDA_VISIBLE_DEVICES=4,5 SHARED=1 ")
    assert "--num-gpus=2" in line
