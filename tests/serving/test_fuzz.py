"""A thousand broken bodies against the front door and vLLM's request classes; no engine."""

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

from serving.ports import free_ports
from sizing.plan import to_json

from .generated import schemathesis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import DeploymentMaker, PlanMaker

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory,
    make_deployment: DeploymentMaker,
    make_plan: PlanMaker,
    small_model: Path,
) -> Iterator[str]:
    """Have a front door up whose servers check bodies as vLLM does."""
    place = tmp_path_factory.mktemp("fuzz")
    plan = place / "plan.json"
    plan.write_text(to_json(make_plan(make_deployment(small_model))))
    [port] = free_ports(1)
    with (place / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, HERE / "schema_server.py", plan, str(port)], stdout=log, stderr=log
        )
    try:
        _wait(f"http://127.0.0.1:{port}", place / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _wait(url: str, log: Path) -> None:
    """Wait until somebody answers."""
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
    command = [sys.executable, HERE / "front_checks.py", "fuzz", url, "1000", "1"]
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
