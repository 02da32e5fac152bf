"""A real Prometheus that scrapes an endpoint, and the queries of the Grafana dashboard."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from serving.cluster.ports import free_ports
from tests.waiting import until

MONITORING = Path(__file__).parents[2] / "monitoring"
CONFIG = MONITORING / "prometheus.yml"
DASHBOARD = MONITORING / "grafana/dashboards/minicluster.json"
WINDOW = "30s"
START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus at an address."""

    base_url: str

    def ask(self, query: str) -> dict[str, float]:
        """Return what a query gives at this moment: labels as JSON, without what is no number."""
        asked = urlencode({"query": query.replace("$window", WINDOW)})
        with urlopen(f"{self.base_url}/api/v1/query?{asked}") as answer:  # noqa: S310
            found = json.load(answer)["data"]["result"]
        values = {
            json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in found
        }
        return {labels: value for labels, value in values.items() if not isnan(value)}

    def ready(self) -> bool:
        """Tell whether it answers."""
        with suppress(OSError), urlopen(f"{self.base_url}/-/ready") as answer:  # noqa: S310
            return bool(answer.status == 200)
        return False


def dashboard_queries() -> list[str]:
    """Return every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@contextmanager
def scraping(endpoint: str, place: Path) -> Iterator[Prometheus]:
    """
    Have Prometheus scrape *endpoint* once a second; it keeps its files in *place*.

    Its configuration is the one that docker-compose.yml mounts, with this endpoint as target.
    """
    found = shutil.which("prometheus")
    assert found, "no Prometheus: `apt-get install prometheus`"
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = "1s"
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [endpoint.removeprefix("http://")]}]
    file = place / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    [port] = free_ports(1)
    command = [
        found,
        f"--config.file={file}",
        f"--storage.tsdb.path={place / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (place / "prometheus.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        until(lambda: process.poll() is not None or server.ready(), "Prometheus", START_LIMIT_S)
        assert process.poll() is None, (place / "prometheus.txt").read_text()
        yield server
    finally:
        process.terminate()
        process.wait()
