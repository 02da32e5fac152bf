"""A thousand broken bodies against the endpoint and vLLM's request classes; no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from minicluster.plan import to_json
from serving.cluster.ports import free_ports

from .deployed import endpoint_checks, healthy, schemathesis, until

if TYPE_CHECKING:
    from minicluster.plan import Plan

    from .forks import Forks

SERVE = """
import sys
from pathlib import Path
from schema_server import main
main(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, plan: Plan, forks: Forks) -> str:
    """Have an endpoint up, until all tests end, whose servers check bodies as vLLM does."""
    place = tmp_path_factory.mktemp("fuzz")
    (place / "plan.json").write_text(to_json(plan))
    [port] = free_ports(1)
    forks.start(SERVE, str(place / "plan.json"), str(port), log=place / "log")
    url = f"http://127.0.0.1:{port}"
    until(lambda: healthy(url), f"an endpoint answers: {place / 'log'}")
    return url


def test_broken_bodies_get_clear_answers(url: str) -> None:
    """None is a 5xx, each 4xx names a field, and valid requests between them are answered."""
    found = endpoint_checks("fuzz", url, 1000, 1)
    assert found["first"] == []
    assert found["statuses"]["200"] >= 150
    assert found["statuses"]["400"] >= 500


@pytest.mark.campaign
def test_schemathesis_finds_nothing(url: str) -> None:
    """What is generated from our own schema gets the answers that the schema promises."""
    code, said = schemathesis(url, examples=100)
    assert code == 0, said
