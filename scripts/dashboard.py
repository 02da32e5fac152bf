"""
`make test-dashboard`: every query of the Grafana dashboard, run by a real Prometheus.

Deploys the demo plan of `make demo` (or the plan given; or takes the endpoint at the URL given),
has Prometheus scrape it by monitoring/prometheus.yml, sends a load, and asks each query. Exit code
3 if one returns nothing. Needs `prometheus` on the PATH (Debian: apt-get install prometheus).
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from minicluster.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Iterator

BIN = Path(sys.executable).parent
PLAN = Path("out/demo/plan.json")
DASHBOARD = Path("monitoring/grafana/dashboards/minicluster.json")
CONFIG = Path("monitoring/prometheus.yml")
WINDOW = "30s"
LOAD_S = 40
START_S = 30


def main() -> int:
    """Deploy, scrape, load, ask; return the exit code."""
    binary = shutil.which("prometheus")
    given = sys.argv[1] if len(sys.argv) > 1 else str(PLAN)
    up = given.startswith("http://")
    if binary is None or not (up or Path(given).exists()):
        lacking = "prometheus on the PATH" if binary is None else f"{given} (`make demo`)"
        sys.stderr.write(f"dashboard: needs {lacking}\n")
        return Exit.BAD_INPUT
    if up:
        return check(binary, given)
    port = free_port()
    subprocess.run([BIN / "serving", "up", given, "--port", str(port)], check=True)
    try:
        return check(binary, f"http://127.0.0.1:{port}")
    finally:
        subprocess.run([BIN / "serving", "down"], check=False)


def check(binary: str, endpoint: str) -> int:
    """Scrape and load an endpoint, and ask; return the exit code."""
    with prometheus(binary, endpoint.removeprefix("http://")) as base_url:
        load(endpoint)
        return report(base_url)


def load(base_url: str) -> None:
    """Send requests for a while."""
    with urllib.request.urlopen(f"{base_url}/v1/models") as answer:
        model = json.loads(answer.read())["data"][0]["id"]
    deadline, number = time.monotonic() + LOAD_S, 0
    while time.monotonic() < deadline:
        number += 1
        body = {"model": model, "prompt": f"Request {number}: " + "word " * 5, "max_tokens": 12}
        request = urllib.request.Request(
            f"{base_url}/v1/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()


def report(base_url: str) -> int:
    """Print what each query returns; return the exit code."""
    empty = 0
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            found = ask(base_url, target["expr"].replace("$window", WINDOW))
            values = [float(each["value"][1]) for each in found]
            good = bool(values) and all(value == value for value in values)  # noqa: PLR0124  (NaN)
            empty += not good
            said = ", ".join(f"{value:.4g}" for value in values[:4]) or "nothing"
            print(f"{'ok  ' if good else 'BAD '} {panel['title'][:40]:40} {said}")
            if not good:
                print(f"     {target['expr']}")
    print(f"{empty} queries without data")
    return Exit.NEGATIVE if empty else Exit.DONE


def ask(base_url: str, query: str) -> list[dict[str, Any]]:
    """Run one query at this moment."""
    parameters = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"{base_url}/api/v1/query?{parameters}") as answer:
        said = json.loads(answer.read())
    found: list[dict[str, Any]] = said["data"]["result"]
    return found


@contextmanager
def prometheus(binary: str, target: str) -> Iterator[str]:
    """Have the shipped configuration scraped, with the demo as its target."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = "2s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "prometheus.yml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        options = (
            f"--config.file={file}",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        )
        process = subprocess.Popen([binary, *options])
        try:
            wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def wait_for(port: int) -> None:
    """Wait until a server listens there."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
