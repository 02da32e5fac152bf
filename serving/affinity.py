"""Keep each engine on the cores that the plan gave it: a plugin that vLLM loads in every process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

KEEP_AFFINITY = "MINICLUSTER_KEEP_AFFINITY"
"""Environment variable that our CPU replicas set; without it the plugin does nothing."""


def keep_planned_cores() -> None:
    """
    Stop NIXL from taking cores that the plan gave to an engine, or half of one.

    On a CPU vLLM's NIXL worker moves itself to the last core of the NUMA node, so that two
    engines on two cores end up on one of them. And NIXL's progress thread never sleeps: it shares
    the engine's core, and took half of it (a decode step then took 35 ms instead of 11).
    """
    if os.environ.get(KEEP_AFFINITY) != "1":
        return
    # vLLM would set it before it imports NIXL; we import NIXL first.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl._api import nixl_agent  # noqa: PLC0415  (loaded inside vLLM only)
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    # It asks the platform for the cores of each node; told of none, it leaves the affinity alone.
    CpuPlatform.discover_numa_topology = classmethod(_no_nodes)
    if getattr(nixl_agent.__init__, "__name__", "") != "_init_with_idle_threads":
        nixl_agent.__init__ = _with_idle_threads(nixl_agent.__init__)


def _no_nodes(_platform: type) -> list[list[int]]:
    """Stand in for `CpuPlatform.discover_numa_topology`."""
    return []


def _with_idle_threads(init: Any) -> Any:  # noqa: ANN401
    """Wrap a constructor: the threads it starts run only while their core has nothing else to do."""

    def _init_with_idle_threads(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        before = _threads()
        init(*args, **kwargs)
        for thread in _threads() - before:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

    return _init_with_idle_threads


def _threads() -> set[int]:
    """Return the ids of this process's threads."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}
