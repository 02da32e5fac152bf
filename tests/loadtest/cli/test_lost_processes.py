"""Processes and files that disappear during a run: nothing that is left waits for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil

from loadtest.run.client_health import UNWRITABLE
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


def mock_servers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "loadtest.selftest.mock_server" in child.cmdline()
    ]


def test_the_reader_of_stderr_is_gone(start_server: ServerStarter, tmp_path: Path) -> None:
    """
    A run whose parent was killed, and with it the server and the reader of its messages, ends.

    So did `make demo`: its load test waited for ever if the next one had removed the folder.
    """
    folder = tmp_path / "run"
    process = start_run(start_server(**FAST), folder, "--processes", "2")
    process.stderr.close()
    shutil.rmtree(folder)
    mock_servers()[0].kill()
    with process:
        assert process.wait(60) == Exit.BAD_INPUT


def test_a_full_disk_ends_the_run(start_server: ServerStarter, tmp_path: Path) -> None:
    """The run says so, and what was measured can be judged."""
    process = start_run(start_server(**FAST), tmp_path)
    client = psutil.Process(process.pid).children()[0]
    client.rlimit(psutil.RLIMIT_FSIZE, (20_000, 20_000))
    _, err = process.communicate(timeout=60)
    judged = loadtest("report", tmp_path)

    assert process.returncode == Exit.BAD_INPUT, err
    assert "File too large" in err
    assert f"loadtest report {tmp_path}" in " ".join(err.split())
    assert "Traceback" not in err
    assert json.loads((tmp_path / "client.json").read_text())["stop"] == UNWRITABLE
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
