from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from serving.affinity import KEEP_AFFINITY

if TYPE_CHECKING:
    from .forks import Forks

pytestmark = pytest.mark.xdist_group("vllm")  # one worker imports it

LOOK = """
from serving.affinity import keep_planned_cores
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
rested = type(_api.nixlBind).__name__ == "_Rested"
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
