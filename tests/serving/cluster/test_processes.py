from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.cluster.processes import cluster_processes, environment, stop
from tests.serving.deployed import until

TOKEN = Path("token")
"""None of these processes needs one."""

ORPHANS = """
import os, signal, subprocess, sys, time
sleeper = "import time; time.sleep(60)"
stubborn = f"import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
stubborn += f"subprocess.Popen([sys.executable, '-c', {sleeper!r}], env=dict()); {sleeper}"
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
print("started", flush=True)
"""


@pytest.fixture
def cluster_id() -> Iterator[str]:
    """Return a fresh mark, and end what still bears it after the test."""
    mark = secrets.token_hex(8)
    yield mark
    stop(mark, grace_s=0)


def test_orphans_are_found_and_stopped(cluster_id: str) -> None:
    """
    Processes are found by their mark when their parent is dead, and stopped, the deaf too.

    They have sessions of their own, and one a child without the mark. Stopping another cluster
    does not touch them.
    """
    subprocess.run([sys.executable, "-c", ORPHANS], env=environment(cluster_id, TOKEN), check=True)
    stop(secrets.token_hex(8))
    until(lambda: len(cluster_processes(cluster_id)) == 3, "the orphans and a child", 60)
    stop(cluster_id, grace_s=0.3)
    assert cluster_processes(cluster_id) == set()


def test_a_zombie_is_no_process(cluster_id: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], env=environment(cluster_id, TOKEN))
    until(lambda: cluster_processes(cluster_id) == set(), "a zombie", 60)
    child.wait()
