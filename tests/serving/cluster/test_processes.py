from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import pytest

from minicluster.errors import TargetFailed
from serving.cluster import ports, processes
from serving.cluster.processes import RAYLET, cluster_processes, environment, raylet_gpus, stop
from tests.waiting import until

TOKEN = Path("token")
"""None of these processes needs one."""

ORPHANS = """
import os, signal, subprocess, sys, time
sleeper = "import time; time.sleep(60)"
stubborn = f"import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
stubborn += f"subprocess.Popen([sys.executable, '-c', {sleeper!r}], env=dict()); {sleeper}"
polite = "import signal; signal.signal(signal.SIGTERM, lambda *_: (print('asked'), exit()));"
polite += "print('ready', flush=True);" + sleeper
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
subprocess.Popen([sys.executable, "-c", polite], start_new_session=True, stdout=open("said", "w"))
"""


@pytest.fixture
def cluster_id() -> Iterator[str]:
    """Return a fresh mark, and end what still bears it after the test."""
    mark = secrets.token_hex(8)
    yield mark
    stop(mark, grace_s=0)


def test_orphans_are_found_and_stopped(cluster_id: str, tmp_path: Path) -> None:
    """
    Processes are found by their mark when their parent is dead; they are asked to end, then killed.

    They have sessions of their own, and one a child without the mark. Stopping another cluster
    does not touch them.
    """
    env, said = environment(cluster_id, TOKEN), tmp_path / "said"
    subprocess.run([sys.executable, "-c", ORPHANS], env=env, cwd=tmp_path, check=True)
    until(lambda: said.read_text() == "ready\n", "the polite one", 60)
    stop(secrets.token_hex(8))
    until(lambda: len(cluster_processes(cluster_id)) == 3, "the orphans and a child", 60)
    stop(cluster_id, grace_s=0.3)
    assert cluster_processes(cluster_id) == set()
    assert said.read_text() == "ready\nasked\n"


def test_gpus_of_raylets_are_those_they_may_see(cluster_id: str) -> None:
    """With work or without; those of another cluster, or of no raylet, are not counted."""
    given = {"CUDA_VISIBLE_DEVICES": "0,2", RAYLET: f"{cluster_id}-decode-node-0"}
    for changes in (given, given | {"CUDA_VISIBLE_DEVICES": ""}, {RAYLET: "mark"}, {}):
        env = environment(cluster_id, TOKEN) | changes
        subprocess.run(["sh", "-c", "sleep 60 &"], env=env, check=True, start_new_session=True)
    until(lambda: len(cluster_processes(cluster_id)) == 4, "four processes", 60)
    assert raylet_gpus(cluster_id) == {0, 2}
    assert raylet_gpus(secrets.token_hex(8)) == set()


def test_logs_of_a_cluster_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that logs without end does not fill the disk; the operator's own length counts."""
    assert int(environment("x", TOKEN)["RAY_ROTATION_MAX_BYTES"]) == 64 << 20
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "1000")
    assert environment("x", TOKEN)["RAY_ROTATION_MAX_BYTES"] == "1000"


def test_what_killed_processes_shared_is_removed(cluster_id: str) -> None:
    """What others share stays."""
    shares = (
        "import sys, time; from multiprocessing import resource_tracker, shared_memory as memory\n"
        "one = memory.SharedMemory(create=True, size=9)\n"
        "resource_tracker.unregister(one._name, 'shared_memory')\n"
        "print(one.name, flush=True); time.sleep(60)"
    )
    other = SharedMemory(create=True, size=9)
    env = environment(cluster_id, TOKEN)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", shares], env=env, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            file = Path("/dev/shm") / process.stdout.readline().strip()  # noqa: S108
            assert file.exists()
            stop(cluster_id, grace_s=0)
        assert not file.exists()
        assert (Path("/dev/shm") / other.name).exists()  # noqa: S108
    finally:
        other.close()
        other.unlink()


def test_none_is_killed_while_others_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL comes only when no process has ended for the whole grace period."""
    ends_s, now_s, sent = {1: 0.7, 2: 1.4, 3: 2.1}, [0.0], []

    def alive(*_: object) -> set[int]:
        killed = {pid for pid, number in sent if number == signal.SIGKILL}
        return {4, *(pid for pid, at in ends_s.items() if at > now_s[0])} - killed

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(processes, "time", clock)
    monkeypatch.setattr(processes, "cluster_processes", alive)
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: sent.append((pid, number)))
    stop("mark", grace_s=1.0)
    assert [pid for pid, number in sent if number == signal.SIGKILL] == [4]
    assert now_s[0] > 2.1 + 1.0


def test_a_zombie_is_no_process(cluster_id: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], env=environment(cluster_id, TOKEN))
    until(lambda: cluster_processes(cluster_id) == set(), "a zombie", 60)
    child.wait()


def test_what_does_not_end_is_named(cluster_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the kernel blocks are waited for up to a limit."""
    monkeypatch.setattr(processes, "STOP_LIMIT_S", 0.3)
    monkeypatch.setattr(processes, "cluster_processes", lambda *_: {2**22 + 1})
    with pytest.raises(TargetFailed, match=r"\[4194305\] do not end"):
        stop(cluster_id)


def test_a_port_for_later_is_none_that_the_kernel_gives_away_meanwhile() -> None:
    """Neither to a server that names none, nor to the engines, whose ports are 20,000 to 24,000."""
    chosen = [port for _ in range(20) for port in ports.free_ports(3)]
    assert all(24_000 <= port < 32_768 for port in chosen)
    assert len(set(chosen)) > 50, "two deployments at once choose others"
    with socket.create_server(("127.0.0.1", chosen[0])):
        assert not ports.is_free("127.0.0.1", chosen[0])


def test_the_ports_of_both_pools_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first port is chosen only where the other pool's is free, too."""
    first, other = ports.free_ports(2)
    monkeypatch.setattr(ports, "NIXL_PORT", first)
    monkeypatch.setattr(ports, "NIXL_PORTS", 2)
    monkeypatch.setattr(ports, "NIXL_PORTS_APART", {"prefill": 0, "decode": other - first})
    assert ports.free_nixl_port(1) == first
    with (
        socket.create_server(("127.0.0.1", other)),
        pytest.raises(TargetFailed, match="no 1 free ports"),
    ):
        ports.free_nixl_port(1)
