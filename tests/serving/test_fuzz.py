"""A thousand broken bodies against the endpoint and vLLM's request classes; no engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from minicluster.plan import to_json
from serving.cluster.ports import free_ports

from .generated import schemathesis
from .plans import make_deployment, make_plan

if TYPE_CHECKING:
    from .forks import Forks

HERE = Path(__file__).parent


SERVE = """
import sys
from pathlib import Path
from schema_server import main
main(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, small_model: Path, forks: Forks) -> str:
    """Have an endpoint up, until all tests end, whose servers check bodies as vLLM does."""
    place = tmp_path_factory.mktemp("fuzz")
    plan = place / "plan.json"
    plan.write_text(to_json(make_plan(make_deployment(small_model))))
    [port] = free_ports(1)
    forks.start(SERVE, str(plan), str(port), log=place / "log")
    _wait(f"http://127.0.0.1:{port}", place / "log")
    return f"http://127.0.0.1:{port}"


def _wait(url: str, log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urlopen(f"{url}/health"):  # noqa: S310  (our own)
                return
        except URLError:
            time.sleep(0.3)
    pytest.fail(log.read_text())


def test_broken_bodies_get_clear_answers(url: str) -> None:
    """None is a 5xx, each 4xx names a field, and valid requests between them are answered."""
    command = [sys.executable, HERE / "endpoint_checks.py", "fuzz", url, "1000", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["first"] == []
    assert found["statuses"]["200"] >= 150
    assert found["statuses"]["400"] >= 500


@pytest.mark.campaign
def test_schemathesis_finds_nothing(url: str) -> None:
    """What is generated from our own schema gets the answers that the schema promises."""
    code, said = schemathesis(url, examples=100)
    sys.stdout.write(said[-600:])
    assert code == 0, said
