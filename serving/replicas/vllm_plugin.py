"""Keep each engine on the cores that the plan gave it: a plugin for vLLM's processes."""

from __future__ import annotations

import os
from functools import partialmethod
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from serving.cluster.processes import KEEP_AFFINITY
from serving.replicas.end_with_replica import end_with_replica

PROGRESS_DELAY_US = 1_000
"""How long NIXL's progress thread sleeps when nothing moves; an event wakes it at once."""

BUSY_LOOP_S = 0.0
"""How long vLLM's processes spin for each other's messages before they sleep; its own choice: 1."""

RECHECK_MS = 1
"""
How long they then sleep before they look again. The wake-up that comes with a message is often
lost (vLLM knows, and looks again after 5 s: what seemed to be stalled KV transfers of 5, 10, 30 s).
"""


NICENESS = 10
"""Of a worker, against 0 of the processes that carry its messages."""


def keep_planned_cores() -> None:
    """
    Stop what takes cores from the engines that the plan gave them to (docs/adr/0101).

    On a CPU vLLM's NIXL worker moves itself to the last core of the NUMA node, so that two
    engines on two cores end up on one. The thread that moves NIXL's transfers never sleeps: it
    shares the engine's core and took half of it. And vLLM's processes wait for one another
    spinning, up to a second long, then sleeping, up to five: on cores of their own the first
    saves microseconds, on shared ones it takes the time of those they wait for.
    """
    end_with_replica()
    if os.environ.get(KEEP_AFFINITY) != "1":
        return
    # vLLM would set it before it imports NIXL; we import NIXL first.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _api as nixl  # noqa: PLC0415  (loaded inside vLLM only)
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    # It asks the platform for the cores of each node; told of none, it leaves the affinity alone.
    CpuPlatform.discover_numa_topology = classmethod(_no_nodes)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    waiting = shm_broadcast.SpinCondition
    waiting.__init__ = partialmethod(waiting.__init__, busy_loop_s=BUSY_LOOP_S)
    if not isinstance(nixl.nixlBind, _Rested):
        nixl.nixlBind = _Rested(nixl.nixlBind)
    if current_process().name.startswith("VllmWorker"):
        order_within_session()


def order_within_session() -> None:
    """
    Let processes that carry tokens go before those that compute them, inside this cluster alone.

    A worker never rests while there is work; the processes that route requests and pass tokens on
    need little, but at once. Where the kernel groups processes by session or by control group,
    niceness counts inside the group only, and the group keeps its share against every other one.
    Where it does not, a nice worker would make way for the whole machine: then all stay alike.
    """
    if niceness_is_local(
        Path("/proc/sys/kernel/sched_autogroup_enabled"), Path("/proc/self/cgroup")
    ):
        os.nice(NICENESS)


def niceness_is_local(autogroup: Path, cgroup: Path) -> bool:
    """
    Tell whether niceness orders only the processes of one session or control group.

    Args:
        autogroup: the kernel's switch, 0 or 1 (sched(7)).
        cgroup: the control groups of this process (cgroups(7)).
    """
    try:
        grouped = [line.split(":", 2) for line in cgroup.read_text(encoding="ascii").split()]
        in_group = any(
            path != "/" for _, names, path in grouped if not names or "cpu" in names.split(",")
        )
        return in_group or autogroup.read_text(encoding="ascii").strip() == "1"
    except (OSError, ValueError):
        return False


def _no_nodes(_platform: type) -> list[list[int]]:
    """Stand in for `CpuPlatform.discover_numa_topology`."""
    return []


class _Rested:
    """
    Stands in for NIXL's bindings: agents are made with a progress thread that sleeps.

    The C++ configuration has a delay for it; NIXL's Python sets that to zero and lets nobody
    choose (nixl 1.3.2, _api.py).
    """

    def __init__(self, bindings: Any) -> None:  # noqa: ANN401
        """Keep the bindings."""
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Everything else is as it was."""
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: ANN401, N802  (NIXL's name)
        """Make an agent."""
        config.pthrDelay = PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)
