from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from serving.cluster.processes import KEEP_AFFINITY
from serving.replicas.vllm_plugin import niceness_is_local

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.forks import Forks

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


def _look(forks: Forks, **environment: str) -> list[str]:
    """Load the plugin in a process of its own, and return what it found."""
    lines = forks.run(LOOK, **environment)
    return [line for line in lines if "INFO" not in line and "WARN" not in line]


def test_names_that_it_replaces_are_there(forks: Forks) -> None:
    """In our replicas nothing pins or spins, and what is replaced is what vLLM and NIXL have."""
    assert _look(forks, **{KEEP_AFFINITY: "1"}) == ["1000", "True", "1", "0.0", "True"]


def test_elsewhere_it_does_nothing(forks: Forks) -> None:
    """Where our replicas' variable is not set, vLLM and NIXL are left as they are."""
    rests, _, recheck, spins, _ = _look(forks, **{KEEP_AFFINITY: "0"})
    assert (rests, recheck, spins) == ("False", "5000", "1")


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
    for name, text in (("autogroup", autogroup), ("cgroup", cgroup)):
        if text is not None:
            (tmp_path / name).write_text(text)

    assert niceness_is_local(tmp_path / "autogroup", tmp_path / "cgroup") is local
