"""What `serving up` refuses before anything is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import Deployable, to_json
from tests.serving.plans import make_deployment, make_plan, make_pool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minicluster.plan import Plan


@pytest.fixture
def plan(small_model: Path) -> Plan:
    """Return a plan that could be deployed."""
    return make_plan(make_deployment(small_model))


def _up(
    place: Path, plan: Plan | str, *options: str, left: Sequence[str] = ("plan.json",)
) -> subprocess.CompletedProcess[str]:
    """Run `serving up`, and see to it that it left nothing."""
    (place / "plan.json").write_text(plan if isinstance(plan, str) else to_json(plan))
    done = subprocess.run(
        [sys.executable, "-m", "serving.cli", "up", "plan.json", *options],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(file.name for file in place.iterdir()) == [*left]
    assert done.stdout == ""
    return done


def test_port_in_use(tmp_path: Path, plan: Plan) -> None:
    """A port in use is bad input: one line, exit 2."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = _up(tmp_path, plan, "--port", port)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"--port is {port}; expected a port of 127.0.0.1 that is free" in done.stderr


def test_every_reason_is_listed(tmp_path: Path, plan: Plan) -> None:
    """A plan that cannot be realised here is refused with all reasons, exit 3."""
    pools = (plan.pools[0], make_pool("decode", (98, 99), tp=2, ep=2, kv_bytes=1.0))
    done = _up(tmp_path, replace(plan, pools=pools))
    assert done.returncode == 3
    for reason in ("serving deploys ep 1", "one sequence of 2048 tokens", "cores [98, 99]"):
        assert reason in done.stderr


def test_plan_that_says_no_itself(tmp_path: Path, plan: Plan) -> None:
    """A plan that is not deployable by its own account is refused with the rule it breaks."""
    no = Deployable(profile="vllm-0.29-nixl", rule_broken="pp = 2")
    done = _up(tmp_path, replace(plan, deployable=no))
    assert done.returncode == 3
    assert "pp = 2" in done.stderr


def test_gpu_target_for_a_cpu_plan(tmp_path: Path, plan: Plan) -> None:
    """A plan is never put on other hardware than it is for."""
    done = _up(tmp_path, plan, "--target", "gpu")
    assert done.returncode == 3
    assert "plan again" in done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 99}, "schema_version is 99"),
        ({"pools": []}, "one prefill and one decode pool"),
        ({"surprise": 1}, "no such field"),
    ],
)
def test_plan_edited_into_nonsense(
    tmp_path: Path, plan: Plan, change: dict[str, object], says: str
) -> None:
    """Another schema version, a missing pool or an unknown field: one line, exit 2."""
    done = _up(tmp_path, json.dumps({**json.loads(to_json(plan)), **change}))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


def test_no_such_plan(tmp_path: Path) -> None:
    """A plan that is not JSON is named."""
    done = _up(tmp_path, "plan?")
    assert done.returncode == 2
    assert "plan.json" in done.stderr


def test_what_a_dead_cluster_left_is_cleared(tmp_path: Path, plan: Plan) -> None:
    """After a reboot or a restart nothing stands in the way; here it is the port that does."""
    blank = dict.fromkeys(("plan", "plan_hash", "session", "started", "deployment"), "gone")
    place = {"address": "127.0.0.2:1", "base_url": "http://127.0.0.1:1", "target": "cpu"}
    state = {"cluster_id": "feedfacefeedface"} | place | blank
    kept = tmp_path / ".minicluster/serving/state.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(state))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = _up(tmp_path, plan, "--port", port, left=[".minicluster", "plan.json"])
    assert f"--port is {port}" in done.stderr
    assert not kept.exists()


def test_open_to_others_only_if_asked_for(tmp_path: Path, plan: Plan) -> None:
    """Without keys another address than loopback is bad input, unless the endpoint is open."""
    done = _up(tmp_path, plan, "--host", "0.0.0.0")  # noqa: S104
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--host is '0.0.0.0'; expected API keys" in done.stderr
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))  # noqa: S104
        other.listen()
        port = str(other.getsockname()[1])
        done = _up(tmp_path, plan, "--host", "0.0.0.0", "--open", "--port", port)  # noqa: S104
    assert f"--port is {port}" in done.stderr
