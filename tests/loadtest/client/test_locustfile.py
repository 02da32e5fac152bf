"""The same client under Locust's own command: web interface and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import loadtest
from loadtest.run.client_health import KILLED, read_client
from loadtest.run.folder import prepare, read_run
from loadtest.run.run_config import RunLength
from minicluster.specs.workload import Lengths
from tests.loadtest import sending
from tests.loadtest.command import ServerStarter
from tests.loadtest.sending import WORKLOAD
from tests.waiting import until

LOCUSTFILE = Path(loadtest.__file__).parent / "client" / "locustfile.py"


def order(host: str, folder: Path, requests: int = 30) -> None:
    workload = replace(WORKLOAD, requests_per_s=40.0, output_tokens=Lengths.fixed(5))
    job = sending.order(host, RunLength(num_requests=requests, warmup_s=0.2), workload=workload)
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

    def over() -> bool:
        return done.exists() and read_client(done).stop != KILLED

    options = ["--web-host", "127.0.0.1", "--web-port", str(free_port)]
    with locust(tmp_path, *options):
        for _ in range(2):
            done.unlink(missing_ok=True)
            until(lambda: ask(f"{url}/stats/requests")["state"] in {"ready", "stopped"}, "Locust")
            assert ask(f"{url}/swarm", b"user_count=1&spawn_rate=1")["success"]
            until(over, "the run's end")
            run = read_run(tmp_path)

            assert len(run.measured) == 30
            assert all(s.ok for s in run.measured)
            until(lambda: shown(url) >= 30, "30 requests in its statistics")
