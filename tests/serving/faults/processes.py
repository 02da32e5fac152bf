"""The processes of a deployment under test, found by what they are, and what is done to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.cluster.processes import cluster_processes

TITLES = {
    "prefill": "ray::ServeReplica:minicluster:Prefill",
    "decode": "ray::ServeReplica:minicluster:Decode",
    "ingress": "ray::ServeReplica:minicluster:Ingress",
    "gate": "ray::ServeReplica:minicluster:Gate",
    "controller": "ray::ServeController",
}
"""How the titles of processes begin that Ray Serve starts."""

RAY = {
    "gcs": "/gcs/gcs_server --",
    "raylet": "/raylet/raylet --raylet_socket_name",
    "dashboard": "/dashboard/dashboard.py --",
    "agent": "ray::DashboardAgent",
    "environments": "ray::RuntimeEnvAgent",
}
"""What is in the command lines of Ray's own processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process: `role` of `TITLES` or `RAY`, `/engine` and `/worker` for what vLLM starts."""

    pid: int
    role: str
    replica: int

    @property
    def resident_bytes(self) -> int:
        """Memory that is its own, in RAM; what it shares with others is not counted."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def processes(cluster_id: str) -> list[Process]:
    """Return what of a cluster has a role, replicas with their pid as `replica`."""
    titles: dict[int, str] = {}
    parents: dict[int, int] = {}
    for pid in cluster_processes(cluster_id):
        with suppress(psutil.Error):  # ended meanwhile
            titles[pid] = " ".join(psutil.Process(pid).cmdline()).strip()
            parents[pid] = psutil.Process(pid).ppid()
    found = [
        Process(pid=pid, role=role, replica=pid)
        for pid, title in titles.items()
        for role, part in (TITLES | RAY).items()
        if title.startswith(part) or (role in RAY and part in title)
    ]
    for pid, title in titles.items():
        below = "engine" if "EngineCore" in title else "worker" if "Worker" in title else None
        above = parents.get(pid)
        while above is not None and not any(each.pid == above for each in found):
            above = parents.get(above)
        owner = next((each for each in found if each.pid == above), None)
        if title.startswith("VLLM::") and below and owner is not None:
            role = owner.role.partition("/")[0]
            found.append(Process(pid=pid, role=f"{role}/{below}", replica=owner.replica))
    return found


def kill(*victims: Process) -> None:
    """End processes at once, as the kernel does when memory runs out."""
    _send(signal.SIGKILL, victims)


@contextmanager
def stopped(*victims: Process) -> Iterator[None]:
    """Have processes stand still for the duration of the block."""
    assert victims
    _send(signal.SIGSTOP, victims)
    try:
        yield
    finally:
        _send(signal.SIGCONT, victims)


def _send(number: signal.Signals, victims: Sequence[Process]) -> None:
    for each in victims:
        with suppress(ProcessLookupError):
            os.kill(each.pid, number)
