"""Broken bodies by the thousand, against vLLM's request classes alone, and against engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from minicluster.plan import Plan, to_json
from serving.cluster.ports import free_ports
from serving.request.cost import MAX_OUTPUT_TOKENS
from tests.waiting import until

from .client import answers
from .deployed import Shared, healthy, up
from .forks import Forks
from .fuzz import fuzz, schemathesis

ON_ENGINES = [pytest.mark.engine, pytest.mark.campaign]
SERVE = """
import sys
from pathlib import Path
from schema_server import main
main(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory, plan: Plan, forks: Forks) -> str:
    """Have an endpoint up, until all tests end, whose servers check bodies as vLLM does."""
    place = tmp_path_factory.mktemp("fuzz")
    (place / "plan.json").write_text(to_json(plan))
    [port] = free_ports(1)
    forks.start(SERVE, str(place / "plan.json"), str(port), log=place / "log")
    url = f"http://127.0.0.1:{port}"
    until(lambda: healthy(url), f"an endpoint answers: {place / 'log'}")
    return url


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, exact_plan: Plan, shared: Shared
) -> Iterator[str]:
    """Have it deployed with short answers: without a length they would fill the whole context."""
    shared.end()
    with up(tmp_path_factory.mktemp("fuzz"), exact_plan, **{MAX_OUTPUT_TOKENS: "16"}) as found:
        yield found


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(
    ("url", "count"),
    [("schema", 1000), pytest.param("engines", 10_000, marks=ON_ENGINES)],
    indirect=["url"],
)
def test_broken_bodies_get_clearanswers(url: str, count: int) -> None:
    """None is a 5xx, each 4xx names a field, and valid requests between them stay right."""
    statuses, complaints = fuzz(url, count, 1)
    sys.stdout.write(f"\nfuzz: {statuses}, {len(complaints)} complaints\n")
    assert complaints == []
    assert statuses[200] >= 0.15 * count
    assert statuses[400] >= 0.5 * count
    assert answers(url)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "url", ["schema", pytest.param("engines", marks=ON_ENGINES)], indirect=True
)
def test_schemathesis_finds_nothing(url: str) -> None:
    """What is generated from our own schema gets the answers that the schema promises."""
    code, said = schemathesis(url, examples=100)
    assert code == 0, said
    assert answers(url)
