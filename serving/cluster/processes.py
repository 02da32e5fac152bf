"""The processes of a cluster: how they are marked, found and stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

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


def environment(cluster_id: str, token: Path) -> dict[str, str]:
    """Return the environment of the processes of a cluster, with its token."""
    variables = {
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
    wanted = f"{variable}={mark}".encode()
    parents: dict[int, int] = {}
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = _parent(entry)
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except (OSError, ValueError):
            continue  # ended meanwhile, or another user's
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {os.getpid()}


def _parent(entry: Path) -> int:
    """Return the parent of a process; raises ValueError for one that has ended."""
    # The command, in parentheses, may itself contain blanks and parentheses.
    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    if state in "ZX":
        raise ValueError(entry.name)
    return int(parent)


def stop(
    mark: str, *, variable: str = MARK, grace_s: float = 5.0, limit_s: float = 30.0
) -> set[int]:
    """
    Stop every process of a cluster (or raylet): by SIGTERM, after *grace_s* by SIGKILL.

    Returns:
        The processes that are left after *limit_s*: none, unless the kernel blocks them.
    """
    started = time.monotonic()
    while alive := cluster_processes(mark, variable):
        waited = time.monotonic() - started
        if waited > limit_s:
            return alive
        for pid in alive:
            try:
                os.kill(pid, signal.SIGTERM if waited < grace_s else signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
    return set()
