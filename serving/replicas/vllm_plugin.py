"""A plugin for vLLM's processes: they keep to their planned cores, and end with their replica."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partialmethod
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from serving.cluster.processes import KEEP_AFFINITY
from serving.replicas.cpu_experts import share_experts_on_cpu
from serving.replicas.step_log import log_steps

PROGRESS_DELAY_US = 1_000
"""Sleep of NIXL's progress thread while no transfer runs; an event wakes it at once."""

BUSY_LOOP_S = 0.0
"""Time that vLLM's processes spin for a message before they sleep; vLLM's default: 1."""

RECHECK_MS = 1
"""
Longest sleep until they check again. The wake-up that comes with a message is often lost (vLLM
knows, and checks again after 5 s, which looked like KV transfers that stall for 5, 10, 30 s).
"""

NICENESS = 10
"""Niceness of a worker, against 0 of the processes that carry its messages."""

REPLICA = "MINICLUSTER_REPLICA"
"""Environment variable: the process id of the replica that starts an engine."""

PARENT_POLL_S = 0.5


def keep_planned_cores() -> None:
    """
    Keep vLLM's processes to the cores of the plan (docs/adr/0101), and end them with the replica.

    On a CPU vLLM's NIXL worker moves itself to the last core of the NUMA node, so that two
    engines on two cores end up on one. NIXL's transfer thread never sleeps: it shares the engine's
    core and took half of it. And vLLM's processes wait for one another by spinning for up to a
    second, then by sleeping for up to five: spinning saves microseconds on cores of their own, and
    takes the time of the awaited process on shared ones.
    """
    end_with_replica()
    share_experts_on_cpu()
    if "EngineCore" in current_process().name:
        count_recomputed_prompts()
        log_steps()
    if os.environ.get(KEEP_AFFINITY) != "1":
        return
    # vLLM would set it before it imports NIXL; this plugin imports NIXL earlier.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _api as nixl  # noqa: PLC0415  (loaded inside vLLM only)
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    # It asks the platform for the cores of each node; without any it keeps the affinity.
    CpuPlatform.discover_numa_topology = classmethod(_no_nodes)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    waiting = shm_broadcast.SpinCondition
    waiting.__init__ = partialmethod(waiting.__init__, busy_loop_s=BUSY_LOOP_S)
    if not isinstance(nixl.nixlBind, _SleepingProgress):
        nixl.nixlBind = _SleepingProgress(nixl.nixlBind)
    if current_process().name.startswith("VllmWorker"):
        lower_worker_priority()


def count_recomputed_prompts() -> None:
    """
    Correct the scheduler's statistics of a prompt whose KV cache was lost on its way.

    vLLM 0.29 counts it as fetched, whatever becomes of the transfer, and reports its failure only
    in a counter of the engine. `serving.replicas.vllm_answers` reads the statistics.
    """
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  (loaded inside vLLM only)

    update = Scheduler._update_requests_with_invalid_blocks  # noqa: SLF001

    def corrected(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = update(self, *args, **kwargs)
        for name in found[0]:
            request = self.requests[name]
            if request.prefill_stats is not None:
                request.prefill_stats.set(request.num_prompt_tokens, request.num_computed_tokens, 0)
        return found

    Scheduler._update_requests_with_invalid_blocks = corrected  # noqa: SLF001


def lower_worker_priority() -> None:
    """
    Lower the priority of a worker against the processes that carry tokens, inside this cluster.

    A worker computes as long as there is work; the processes that route requests and forward tokens
    need little time, but at once. Where the kernel groups processes by session or control group,
    niceness counts inside the group only, and the group keeps its share of the machine. Elsewhere a
    nice worker would yield to every process of the machine, so it keeps its priority.
    """
    if niceness_is_local(
        Path("/proc/sys/kernel/sched_autogroup_enabled"), Path("/proc/self/cgroup")
    ):
        os.nice(NICENESS)


def niceness_is_local(autogroup: Path, cgroup: Path) -> bool:
    """
    Return whether niceness compares only the processes of one session or control group.

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


def end_with_replica() -> None:
    """
    Kill this engine process when the replica that started it is gone.

    vLLM's workers end with their engine, but an engine does not notice that its replica was
    killed: it would keep its memory, and the ports that the next replica waits for.
    """
    replica = os.environ.get(REPLICA)
    if replica is None or os.getppid() != int(replica):
        return  # the replica itself, or a worker
    threading.Thread(target=_watch_parent, args=(int(replica),), daemon=True).start()


def _watch_parent(replica: int) -> None:
    while os.getppid() == replica:  # an orphan gets another parent
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _no_nodes(_platform: type) -> list[list[int]]:
    """Replace `CpuPlatform.discover_numa_topology`."""
    return []


class _SleepingProgress:
    """
    Replaces NIXL's bindings: agents get a progress thread that sleeps.

    The C++ configuration has a delay for it, which NIXL's Python code sets to zero without an
    option (nixl 1.3.2, _api.py).
    """

    def __init__(self, bindings: Any) -> None:  # noqa: ANN401
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: ANN401, N802  (NIXL's name)
        """Make an agent whose progress thread sleeps."""
        config.pthrDelay = PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config)
