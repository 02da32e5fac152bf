"""vLLM's processes keep to their planned cores, and end with their replica."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serving.cluster.processes import KEEP_AFFINITY, cluster_processes
from tests.serving.forks import Forks
from tests.waiting import until

LOOK = """
from serving.replicas.vllm_plugin import keep_planned_cores
keep_planned_cores()
from nixl import _api
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms.cpu import CpuPlatform
import inspect
class Bindings:
    def nixlAgent(self, name, config):
        return config.pthrDelay
class Config:
    pthrDelay = 0
rested = type(_api.nixlBind).__name__ == "_SleepingProgress"
print(rested and type(_api.nixlBind)(Bindings()).nixlAgent("x", Config()))
print(CpuPlatform.discover_numa_topology() == [])
print(shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS)
print(inspect.signature(shm_broadcast.SpinCondition.__init__).parameters["busy_loop_s"].default)
print("pthrDelay = 0" in inspect.getsource(_api.nixl_agent.__init__))
"""


@pytest.mark.parametrize(
    ("ours", "rests", "topology", "recheck", "spins"),
    [("1", "1000", {"True"}, "1", "0.0"), ("0", "False", {"True", "False"}, "5000", "1")],
)
def test_only_our_replicas_neither_pin_nor_spin(
    forks: Forks, ours: str, rests: str, topology: set[str], recheck: str, spins: str
) -> None:
    """What is replaced is what vLLM and NIXL have; elsewhere both are left as they are."""
    lines = forks.run(LOOK, **{KEEP_AFFINITY: ours})
    found = [line for line in lines if "INFO" not in line and "WARN" not in line]
    assert found.pop(1) in topology
    assert found == [rests, recheck, spins, "True"]


@pytest.mark.parametrize(
    ("autogroup", "cgroup", "local"),
    [
        ("1", "0::/\n", True),
        ("0", "0::/\n", False),
        ("0", "0::/user.slice/user-1000.slice/session-2.scope\n", True),
        ("0", "9:name=systemd:/x\n4:memory:/x\n1:cpu,cpuacct:/\n0::/\n", False),
        ("0", "4:memory:/x\n1:cpu,cpuacct:/docker/7f\n", True),
        (None, "0::/\n", False),
        ("1", None, False),
    ],
)
def test_workers_make_way_for_their_own_cluster_alone(
    tmp_path: Path, autogroup: str | None, cgroup: str | None, *, local: bool
) -> None:
    """Niceness is used only where the kernel counts it inside a session or control group."""
    from serving.replicas.vllm_plugin import niceness_is_local  # noqa: PLC0415  (imports torch)

    for name, text in (("autogroup", autogroup), ("cgroup", cgroup)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert niceness_is_local(tmp_path / "autogroup", tmp_path / "cgroup") is local


REPLICA = "MINICLUSTER_REPLICA"
"""Environment variable of engines: the process that started them."""

ENGINE = (
    "from serving.replicas.vllm_plugin import end_with_replica;"
    " end_with_replica(); print(1, flush=True); "
)
REPLICA_PROCESS = f"""
import os, subprocess, sys
os.environ[{REPLICA!r}] = str(os.getpid())
subprocess.run([sys.executable, "-c", {ENGINE!r} + "import time; time.sleep(600)"])
"""


def test_an_engine_ends_with_its_replica() -> None:
    """When the process that started it is killed, an engine does not live on as an orphan."""
    command = [sys.executable, "-c", REPLICA_PROCESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replica:
        mark = str(replica.pid)
        assert replica.stdout is not None
        assert replica.stdout.readline() == "1\n"
        assert len(cluster_processes(mark, REPLICA)) == 1
        replica.kill()
        until(lambda: not cluster_processes(mark, REPLICA), "the orphan ends", 30)
