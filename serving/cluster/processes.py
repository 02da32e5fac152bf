"""The processes of a cluster: how they are marked, found and stopped."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from minicluster.errors import TargetFailed
from serving.cluster.token import use_token

MARK = "MINICLUSTER_CLUSTER"
"""
Environment variable that every process of a cluster inherits, and is found by. Process ids would
not do: they are reused, and the parent may have ended.
"""

KEEP_AFFINITY = "MINICLUSTER_KEEP_AFFINITY"
"""Environment variable of our CPU replicas; without it the vLLM plugin does nothing."""

RAYLET = "MINICLUSTER_RAYLET"
"""Environment variable that every process of one raylet inherits; it stops one raylet alone."""

LOG_BYTES = 64 << 20
"""Length at which Ray begins a new log file of a process; two older ones are kept."""
SHARED = re.compile(r"/dev/shm/(?:psm_|sem\.mp-)\S+")  # noqa: S108  (others' files)
"""Shared memory and semaphores of Python's `multiprocessing`, among the maps of a process."""

STOP_LIMIT_S = 30.0
"""Longest time for processes to end."""


def environment(cluster_id: str, token: Path) -> dict[str, str]:
    """Return the environment of the processes of a cluster, with its token."""
    variables = {
        # Without them a process that logs without end would fill the disk.
        "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": "2",
        **os.environ,
        MARK: cluster_id,
        # setproctitle would overwrite the environment that the mark is read from.
        "SPT_NOENV": "1",
        # By default Ray lowers the priority of its workers.
        "RAY_worker_niceness": "0",
        # By default Ray reports every call between processes to its head, which keeps 100,000 of
        # them: tens of MB, and work per request, for `ray list tasks`.
        "RAY_task_events_report_interval_ms": "0",
    }
    use_token(variables, token)
    return variables


def cluster_processes(mark: str, variable: str = MARK) -> set[int]:
    """Return the pids of the processes of a cluster (or raylet), and of all their children."""
    parents: dict[int, int] = {}
    pids = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.status() != psutil.STATUS_ZOMBIE:
                parents[process.pid] = process.ppid()
                if process.environ().get(variable) == mark:
                    pids.add(process.pid)
    while grown := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= grown
    return pids - {os.getpid()}


def raylet_gpus(cluster_id: str) -> set[int]:
    """Return the GPUs that the raylets of a cluster on this machine have, with or without work."""
    gpus: set[int] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, KeyError, ValueError):  # ended; without numbered GPUs
            variables = process.environ()
            if variables.get(MARK) == cluster_id and RAYLET in variables:
                gpus.update(map(int, variables["CUDA_VISIBLE_DEVICES"].split(",")))
    return gpus


def stop(mark: str, *, variable: str = MARK, grace_s: float = 1.0) -> None:
    """
    Stop every process of a cluster (or raylet): by SIGTERM, then by SIGKILL.

    SIGKILL comes when none has ended for *grace_s*: Ray's head never ends by SIGTERM. Shared memory
    and semaphores of Python, which killed engines leave, are removed.

    Raises:
        TargetFailed: some do not end, because the kernel blocks them.
    """
    started = ended = time.monotonic()
    before: set[int] = set()
    shared: set[str] = set()
    while alive := cluster_processes(mark, variable):
        now = time.monotonic()
        if now > started + STOP_LIMIT_S:
            raise TargetFailed(f"processes {sorted(alive)} do not end; their state is kept")
        if before - alive:
            ended = now
        for pid in alive - before:
            with suppress(OSError):  # ended meanwhile
                shared |= {*SHARED.findall(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"))}
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if now < ended + grace_s else signal.SIGKILL)
        before = alive
        time.sleep(0.2)
    for file in shared:
        Path(file).unlink(missing_ok=True)
