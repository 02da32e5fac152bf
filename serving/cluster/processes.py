"""Which processes are ours, and how they are stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from serving.cluster.token import use_token

MARK = "MINICLUSTER_CLUSTER"
"""
Environment variable that every process of a cluster inherits. It finds them by what they are,
not by a number: pids are used again, and a parent may be long dead.
"""


KEEP_AFFINITY = "MINICLUSTER_KEEP_AFFINITY"
"""Environment variable that our CPU replicas set; without it the plugin does nothing."""

RAYLET = "MINICLUSTER_RAYLET"
"""Likewise of one raylet, so that it can be stopped alone."""


def environment(cluster_id: str, token: Path) -> dict[str, str]:
    """Return the environment in which the processes of a cluster are started, with its token."""
    variables = {
        **os.environ,
        MARK: cluster_id,
        # setproctitle would write a process's title over the place where we look for the mark.
        "SPT_NOENV": "1",
        # Ray would make way for everything else on the machine; this is what the machine is for.
        "RAY_worker_niceness": "0",
        # Ray would report every call between processes to its head, which keeps 100,000 of them:
        # tens of MB, and work per request, for `ray list tasks`.
        "RAY_task_events_report_interval_ms": "0",
    }
    use_token(variables, token)
    return variables


def marked(mark: str, variable: str = MARK) -> set[int]:
    """Return the pids of the processes of a cluster (or raylet), and of all below them."""
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
            continue  # gone meanwhile, or another user's
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {os.getpid()}


def _parent(entry: Path) -> int:
    """Return the parent of a process; raises ValueError for one that is already dead."""
    # The command, in parentheses, may itself hold blanks and parentheses.
    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    if state in "ZX":
        raise ValueError(entry.name)
    return int(parent)


def stop(
    mark: str, *, variable: str = MARK, grace_s: float = 5.0, limit_s: float = 30.0
) -> set[int]:
    """
    End every process of a cluster (or raylet): politely, then after *grace_s* by force.

    Returns:
        What is still there after *limit_s*: nothing, unless the kernel holds it.
    """
    started = time.monotonic()
    while alive := marked(mark, variable):
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
