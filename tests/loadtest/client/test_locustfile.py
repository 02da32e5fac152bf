"""The same client under Locust's own command: web interface and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import loadtest
from loadtest.run.folder import prepare, read_run
from loadtest.run.run_config import RunLength, free_load, make_job
from loadtest.verdict.prediction import TOLERANCE
from loadtest.verdict.verdict import conclude
from minicluster.errors import Exit
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import ServerStarter

LOCUSTFILE = Path(loadtest.__file__).parent / "client" / "locustfile.py"


def order(host: str, folder: Path, requests: int = 30) -> None:
    """Prepare a run of so many requests in *folder*."""
    workload = WorkloadSpec(
        requests_per_s=40.0, input_tokens=Lengths.fixed(20), output_tokens=Lengths.fixed(5)
    )
    load = free_load(workload, SloSpec(), model="fake", vocab_size=500)
    job = make_job(load, RunLength(num_requests=requests, warmup_s=0.2), host=host, model="fake")
    prepare(folder, job, job.requests(), None)


@contextmanager
def locust(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Locust's own command on our file."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *options]
    environment = os.environ | {"LOADTEST_DIR": str(folder)}
    with (folder / "locust.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def wait_for(condition: Callable[[], Any], folder: Path) -> Any:  # noqa: ANN401
    """Wait until *condition* gives something, at most a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if seen := condition():
                return seen
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError((folder / "locust.log").read_text()[-3000:])


def ask(url: str, data: bytes | None = None) -> dict[str, Any]:
    """Read JSON from Locust's web interface."""
    with urllib.request.urlopen(url, data, timeout=5) as answer:  # noqa: S310  (ours)
        read: dict[str, Any] = json.load(answer)
        return read


def shown(url: str) -> int:
    """Return how many requests Locust's statistics show."""
    return sum(
        int(row["num_requests"])
        for row in ask(f"{url}/stats/requests")["stats"]
        if row["name"] == "/v1/completions"
    )


def test_web_interface_starts_runs_and_shows_them(
    start_server: ServerStarter, free_port: int, tmp_path: Path
) -> None:
    """A run started in the browser is the scheduled one; so is a second one, with fresh prompts."""
    order(start_server(ttft_s=0.05, itl_s=0.01), tmp_path)
    url = f"http://127.0.0.1:{free_port}"
    done = tmp_path / "client.json"
    options = ["--web-host", "127.0.0.1", "--web-port", str(free_port)]
    with locust(tmp_path, *options):
        for _ in range(2):
            done.unlink(missing_ok=True)
            wait_for(
                lambda: ask(f"{url}/stats/requests")["state"] in {"ready", "stopped"}, tmp_path
            )
            assert ask(f"{url}/swarm", b"user_count=1&spawn_rate=1")["success"]
            wait_for(done.exists, tmp_path)
            run = read_run(tmp_path)

            assert len(run.measured) == 30
            assert all(s.ok for s in run.measured)
            wait_for(lambda: shown(url) >= 30, tmp_path)


def test_stop_button_keeps_what_there_is(
    start_server: ServerStarter, free_port: int, tmp_path: Path
) -> None:
    """Stopped in the browser, a run leaves its samples and says that it was interrupted."""
    order(start_server(ttft_s=0.05, itl_s=0.01), tmp_path, requests=5000)
    url = f"http://127.0.0.1:{free_port}"
    with locust(tmp_path, "--web-host", "127.0.0.1", "--web-port", str(free_port)):
        wait_for(lambda: ask(f"{url}/stats/requests"), tmp_path)
        ask(f"{url}/swarm", b"user_count=1&spawn_rate=1")
        wait_for(lambda: shown(url) > 5, tmp_path)
        ask(f"{url}/stop", b"")
        wait_for((tmp_path / "client.json").exists, tmp_path)
    run = read_run(tmp_path)

    assert run.client.stop == "interrupted"
    assert sum(s.ok for s in run.samples) > 5


def test_locusts_own_processes_share_the_schedule(
    start_server: ServerStarter, free_port: int, tmp_path: Path
) -> None:
    """With `--processes 2` Locust's workers send the one schedule, and then the command ends."""
    order(start_server(ttft_s=0.05, itl_s=0.01), tmp_path)
    options = ["--headless", "--processes", "2", "--master-bind-port", str(free_port)]
    options += ["--master-port", str(free_port)]
    with locust(tmp_path, *options) as process:
        wait_for(lambda: process.poll() is not None, tmp_path)
    run = read_run(tmp_path)

    assert run.client.processes == 2
    assert sorted(s.index for s in run.measured) == [r.index for r in run.schedule if r.in_window]
    assert all(s.ok for s in run.measured)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_locusts_own_run_ends_without_a_worker(
    start_server: ServerStarter, free_port: int, tmp_path: Path, number: signal.Signals
) -> None:
    """One of Locust's two workers killed or frozen: nothing waits for it, the run is invalid."""
    order(start_server(ttft_s=0.05, itl_s=0.01), tmp_path, requests=20_000)
    options = ["--headless", "--processes", "2", "--master-bind-port", str(free_port)]
    options += ["--master-port", str(free_port)]
    samples = tmp_path / "samples.jsonl"
    with locust(tmp_path, *options) as process:
        wait_for(lambda: samples.read_text().count("\n") > 20, tmp_path)
        workers = psutil.Process(process.pid).children()
        workers[0].send_signal(number)
        try:
            wait_for((tmp_path / "client.json").exists, tmp_path)
        finally:
            with suppress(psutil.NoSuchProcess):
                workers[0].kill()
    run = read_run(tmp_path)

    assert len(workers) == 2
    assert run.client.stop == "short of a worker"
    assert sum(s.ok for s in run.samples) > 20
    assert conclude(run, TOLERANCE, require_prediction=False).exit == Exit.INCONCLUSIVE
