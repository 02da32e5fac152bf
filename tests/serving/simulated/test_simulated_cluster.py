"""Simulated engines under the real cluster: Ray Serve, the endpoint, replicas that are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.client.endpoint import served_models
from serving.simulated.request import answer_ids, prompt_seed
from tests.serving.command import serving
from tests.serving.deployed import Shared, outstanding, until, up
from tests.serving.faults.load import Load, body_of, under_way
from tests.serving.faults.processes import processes
from tests.serving.plans import make_deployment, make_plan, make_pool, places
from tests.serving.prometheus import dashboard_queries, scraping

pytestmark = pytest.mark.engine

SLOWDOWN = 2.0
PREFILL = 3
QUERIES_LIMIT_S = 100.0
"""Within which every query has data: a rate needs two scrapes, a second apart."""


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, small_model: Path, shared: Shared
) -> Iterator[tuple[str, Path]]:
    """Return address and directory of three prefill and one decode replica, of a plan for GPUs."""
    shared.end()
    place = tmp_path_factory.mktemp("simulated")
    nodes = places(*((f"node-{at}", (0, 1)) for at in range(PREFILL)))
    made = make_deployment(
        small_model,
        prefill=make_pool("prefill", gpu="h100-sxm", tp=2, replicas=PREFILL, placement=nodes),
        decode=make_pool("decode", gpu="h100-sxm", tp=2, placement=places(("node-3", (0, 1)))),
    )
    options = ("--engine", "simulated", "--slowdown", str(SLOWDOWN))
    with up(place, make_plan(made), *options) as base_url:
        yield base_url, place


def test_answers_follow_from_prompts_and_say_that_they_are_simulated(
    cluster: tuple[str, Path], small_model: Path
) -> None:
    base_url, _ = cluster
    vocab_size = json.loads((small_model / "config.json").read_text())["vocab_size"]
    bodies = [body_of(seed, tokens=50 + seed, max_tokens=12) for seed in range(20)]
    with under_way(base_url, bodies) as waiting:
        pass
    for body, future in zip(bodies, waiting, strict=True):
        reply = future.result()
        assert reply.done, reply
        assert reply.path == "remote"
        assert reply.headers["x-minicluster-engine"].startswith("simulated; slowdown=2; ")
        chunks = [json.loads(each) for each in reply.events if each != "[DONE]"]
        text = "".join(each["choices"][0]["text"] for each in chunks)
        ids = answer_ids(prompt_seed(body["prompt"]), 12, vocab_size)
        assert text.split() == [str(each) for each in ids]
    assert served_models(base_url).slowdown == SLOWDOWN


def test_a_plan_for_gpus_is_deployed_as_planned(cluster: tuple[str, Path]) -> None:
    _, place = cluster
    done = serving(place, "verify", "--json")
    assert json.loads(done.stdout)["differences"] == []
    assert f"prefill  {PREFILL} of {PREFILL} replicas, healthy" in (
        said := serving(place, "status").stdout
    )
    assert "simulated, 2 times slower" in said


@pytest.mark.prometheus
def test_every_query_of_the_dashboard_has_data_in_prometheus(
    cluster: tuple[str, Path], tmp_path: Path
) -> None:
    """A real Prometheus, which finds the endpoint by the configuration that is shipped."""
    base_url, _ = cluster
    queries = dashboard_queries()
    deadline_s = time.monotonic() + QUERIES_LIMIT_S

    with (
        Load(base_url, 2, tokens=100, max_tokens=8) as load,
        scraping(base_url, tmp_path) as prometheus,
    ):
        while lacking := [query for query in queries if not prometheus.ask(query)]:
            assert time.monotonic() < deadline_s, lacking
            time.sleep(1.0)
        running = prometheus.ask('minicluster_replicas{role="prefill", kind="running"}')
    assert all(reply.done for reply in load.replies)
    assert [*running.values()] == [PREFILL]


def test_replicas_that_die_cost_no_answer_that_another_can_give(
    cluster: tuple[str, Path],
) -> None:
    """Every request is answered, or refused with its reason; none stays, and replicas come back."""
    base_url, place = cluster
    cluster_id = json.loads((place / ".minicluster/serving/state.json").read_text())["cluster_id"]

    def prefills() -> set[int]:
        return {each.pid for each in processes(cluster_id) if each.role == "prefill"}

    with Load(base_url, 6, tokens=300, max_tokens=8) as load:
        until(lambda: len(load.replies) > 10, "answers before the kill")
        for pid in sorted(prefills())[:2]:
            os.kill(pid, signal.SIGKILL)
        seen = len(load.replies)
        until(lambda: len(load.replies) > seen + 30, "answers after the kill")
    assert {reply.status for reply in load.replies} <= {200, 503}
    assert sum(reply.done for reply in load.replies) > len(load.replies) // 2
    until(lambda: outstanding(base_url) == 0, "no request under way")
    until(lambda: len(prefills()) == PREFILL, "every replica is back", 120.0)
