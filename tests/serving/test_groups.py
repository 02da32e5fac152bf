"""Two data-parallel ranks that divide the experts between them, behind one prefill engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minicluster.plan import Plan
from serving.measurement.demo_model import MOE_SHAPE, make_demo_model
from tests.waiting import until

from .client import answers, send
from .command import serving
from .deployed import REPAIR_LIMIT_S, Shared, up
from .faults.processes import Process, kill, processes
from .faults.reference import FEW_LENGTHS, MAX_TOKENS, Reference, ask_bare_server
from .plans import make_deployment, make_plan, make_pool, places

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

IN_TIME_S = 20.0
"""Within which a request is answered or refused while its group restarts: both deadlines."""


@pytest.fixture(scope="module")
def moe_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a plan in float32: prefill shares a core with one of the ranks of decode."""
    model = make_demo_model(tmp_path_factory.mktemp("models") / "moe", MOE_SHAPE, "fp32")
    ranks = make_pool("decode", dp=2, ep=2, dtype="fp32", placement=places(("laptop", (0, 1))))
    return make_plan(make_deployment(model, dtype="fp32", decode=ranks))


@pytest.fixture(scope="module")
def single_engine(
    moe_plan: Plan, shared: Shared, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Return what one bare engine with all experts answers; the shared deployment ends before."""
    shared.end()
    log = tmp_path_factory.mktemp("reference") / "server.txt"
    return ask_bare_server(Path(moe_plan.model.source), FEW_LENGTHS, log)


@pytest.fixture(scope="module")
def deployed(
    moe_plan: Plan, single_engine: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    assert single_engine.prompts
    place = tmp_path_factory.mktemp("group")
    deadlines = ("--prefill-deadline", "15", "--kv-deadline", "15")
    with up(place, moe_plan, *deadlines) as base_url:
        yield base_url, place


def test_a_group_answers_as_one_engine(
    deployed: tuple[str, Path], single_engine: Reference
) -> None:
    """Prompts pulled from a prefill engine of another layout give its tokens in float32."""
    base_url, place = deployed
    assert single_engine.differences(base_url, "whole") == {}
    verify = serving(place, "verify")
    assert verify.returncode == 0, verify.stdout + verify.stderr
    assert "decode 1xTP1xDP2xEP2" in verify.stdout
    status = serving(place, "status")
    assert "decode   2 of 2 ranks in 1 group" in status.stdout


def test_a_killed_rank_restarts_its_group(
    deployed: tuple[str, Path], single_engine: Reference
) -> None:
    """While its ranks restart, requests are refused in time; then the group answers as before."""
    base_url, place = deployed
    before = {each.pid for each in _engines(place)}
    assert len(before) == 2
    kill(_engines(place)[0])
    body = {"model": "demo", "prompt": [300] * 40, "max_tokens": MAX_TOKENS}
    during = send(f"{base_url}/v1/completions", body)
    assert during.status in {200, 503}
    assert during.seconds < IN_TIME_S
    until(lambda: not before & {each.pid for each in _engines(place)}, "both end", REPAIR_LIMIT_S)
    until(lambda: answers(base_url), "the group answers again", REPAIR_LIMIT_S)
    assert single_engine.differences(base_url, "again", (33, 200)) == {}


def _engines(place: Path) -> list[Process]:
    """Return the engines of the ranks."""
    state = json.loads((place / ".minicluster/serving/state.json").read_text())
    return [each for each in processes(state["cluster_id"]) if each.role == "decode/engine"]
