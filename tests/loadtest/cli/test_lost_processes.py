"""Processes and files that disappear during a run: nothing that is left waits for them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loadtest.run.client_health import KILLED, UNWRITABLE
from loadtest.run.folder import prepare
from minicluster.errors import Exit
from tests.loadtest.command import (
    FAST,
    ServerStarter,
    answered,
    loadtest,
    run,
    start_run,
    verdict_in,
)
from tests.loadtest.sending import order

CLIENT = [sys.executable, "-m", "loadtest.client.locustfile"]


def mock_servers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "loadtest.selftest.mock_server" in child.cmdline()
    ]


@pytest.mark.parametrize(("processes", "removed"), [(1, False), (2, True)])
def test_the_reader_of_stderr_is_gone(
    start_server: ServerStarter, tmp_path: Path, processes: int, *, removed: bool
) -> None:
    """
    A run whose parent was killed, and with it the server and the reader of its messages, ends.

    So did `make demo`: its load test waited for ever if the next one had removed the folder.
    """
    folder = tmp_path / "run"
    process = start_run(start_server(**FAST), folder, "--processes", str(processes))
    process.stderr.close()
    if removed:
        shutil.rmtree(folder)
    mock_servers()[0].kill()

    with process:
        assert process.wait(60) == (Exit.BAD_INPUT if removed else Exit.TARGET_FAILED)
    assert removed or len(answered(folder)) > 10


def test_a_removed_folder_ends_the_run(start_server: ServerStarter, tmp_path: Path) -> None:
    """A run whose folder was removed ends, and the message names the folder: exit 2."""
    folder = tmp_path / "run"
    process = start_run(start_server(**FAST), folder)
    client = psutil.Process(process.pid).children()[0]
    shutil.rmtree(folder)
    client.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)

    assert process.returncode == Exit.BAD_INPUT, err
    assert str(folder) in err
    assert not client.is_running()


@pytest.mark.parametrize(("room_bytes", "stop"), [(20_000, UNWRITABLE), (5_000, KILLED)])
def test_a_full_disk_ends_the_run(
    start_server: ServerStarter, tmp_path: Path, room_bytes: int, stop: str
) -> None:
    """The run says so, and what was measured can be judged, also without room for a report."""
    process = start_run(start_server(**FAST), tmp_path)
    client = psutil.Process(process.pid).children()[0]
    client.rlimit(psutil.RLIMIT_FSIZE, (room_bytes, room_bytes))
    _, err = process.communicate(timeout=60)
    judged = loadtest("report", tmp_path)

    assert process.returncode == Exit.BAD_INPUT, err
    assert "File too large" in err
    assert f"loadtest report {tmp_path}" in " ".join(err.split())
    assert "Traceback" not in err
    assert json.loads((tmp_path / "client.json").read_text())["stop"] == stop
    assert len(answered(tmp_path)) > 5
    assert judged.returncode == Exit.INTERRUPTED, judged.stderr
    assert "disk" in judged.stdout


def test_two_runs_in_one_folder(start_server: ServerStarter, tmp_path: Path) -> None:
    """The second is refused and names the first; a dead one is in nobody's way."""
    host = start_server(**FAST)
    process = start_run(host, tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    second = run(host, tmp_path, "--requests", "20")

    assert second.returncode == Exit.BAD_INPUT
    assert f"process {process.pid}" in " ".join(second.stderr.split())
    assert (tmp_path / "run.json").read_bytes() == before
    client = psutil.Process(process.pid).children()[0]
    process.kill()
    process.communicate()
    client.wait(60)
    run(host, tmp_path, "--requests", "20")
    assert len(answered(tmp_path)) == 20


def test_the_samples_of_a_killed_client(start_server: ServerStarter, tmp_path: Path) -> None:
    """They are judged, and the verdict says that the client was killed."""
    process = start_run(start_server(**FAST), tmp_path)
    psutil.Process(process.pid).children()[0].kill()
    _, err = process.communicate(timeout=60)
    judged = loadtest("report", tmp_path)

    assert process.returncode == Exit.BUG, err
    assert judged.returncode == Exit.INTERRUPTED, judged.stderr
    assert "killed" in judged.stdout
    assert verdict_in(tmp_path)["outcomes"]["ok"] == len(answered(tmp_path)) > 10


def test_the_client_of_a_frozen_server_ends_with_its_parent(
    start_server: ServerStarter, tmp_path: Path
) -> None:
    """A server that stops answering does not keep a client whose parent was killed."""
    process = start_run(start_server(**FAST), tmp_path)
    server = mock_servers()[0]
    server.suspend()
    client = psutil.Process(process.pid).children()[0]
    process.kill()
    process.communicate()
    client.wait(60)
    server.resume()

    assert json.loads((tmp_path / "client.json").read_text())["stop"] == "orphaned"
    assert len(answered(tmp_path)) > 10


def test_a_client_without_a_parent_never_begins(
    start_server: ServerStarter, tmp_path: Path
) -> None:
    job = order(start_server(**FAST))
    prepare(tmp_path, job, job.requests(), None)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    environment = os.environ | {"LOADTEST_DIR": str(tmp_path), "LOADTEST_PARENT": str(gone.pid)}
    done = subprocess.run(CLIENT, env=environment, timeout=60, check=False)

    assert done.returncode
