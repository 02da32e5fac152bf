"""The front door before real engines: clients, broken bodies, metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from .client import post
from .deployed import front_checks, up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .conftest import DeploymentMaker, PlanMaker

pytestmark = pytest.mark.engine

KEY = "a-secret-of-the-tests"


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory,
    demo_model: Path,
    make_deployment: DeploymentMaker,
    make_plan: PlanMaker,
) -> Iterator[str]:
    """Have a plan deployed in float32, where an answer does not depend on its neighbours."""
    plan = make_plan(make_deployment(demo_model, dtype="fp32"))
    with up(tmp_path_factory.mktemp("door"), plan) as found:
        yield found


def _look(url: str) -> Any:  # noqa: ANN401
    """Get JSON."""
    with urlopen(Request(url), timeout=60) as answer:  # noqa: S310  (our own endpoint)
        return json.loads(answer.read())


def _series(url: str) -> dict[str, float]:
    """Scrape."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_broken_bodies_do_no_harm(url: str) -> None:
    """None is a 5xx, each 4xx names a field, and valid requests between them stay right."""
    found = front_checks("fuzz", url, 300, 5)
    assert found["first"] == []
    assert found["statuses"]["200"] >= 40


def test_the_engines_live(url: str) -> None:
    """After all this both pools answer, and nothing is under way."""
    status, body = post(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    assert _series(url)['minicluster_outstanding_requests{stage="all"}'] == 0
