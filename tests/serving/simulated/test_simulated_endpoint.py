"""A deployment's commands and its endpoint, where it does not matter what computes the tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from serving.cluster.ports import free_ports
from tests.serving.client import answers, send
from tests.serving.command import serving
from tests.serving.deployed import Split, series
from tests.serving.faults.load import Load, body_of, refused
from tests.serving.prometheus import dashboard_queries, scraping

pytestmark = pytest.mark.simulated

QUERIES_LIMIT_S = 100.0
"""Within which every query has data: a rate needs two scrapes, a second apart."""


def test_up_says_where_it_serves(cluster: Split) -> None:
    said = (cluster.place / "up.txt").read_text()
    assert f"ready: {cluster.base_url}/v1 serves demo" in said
    assert "serving down" in said


def test_metrics_count_what_clients_got(cluster: Split) -> None:
    """Each request is counted once, with its path; transfers and queues are timed."""
    cluster.wait_until_whole()
    cluster.wait_until_released()
    before = series(cluster.base_url)
    for number in range(5):
        reply = send(f"{cluster.base_url}/v1/completions", body_of(number, max_tokens=6))
        assert reply.path == "remote"
        timing = reply.headers["server-timing"].split(", ")
        phases = [part.split(";dur=")[0] for part in timing]
        assert phases == ["prefill_queue", "prefill", "handoff"]
        # The usage that we count by is not for the client.
        assert not any('"choices":[]' in event for event in reply.events)
    cluster.wait_until_released()
    after = series(cluster.base_url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['minicluster_requests_total{outcome="ok",path="remote"}'] == 5
    assert grown['minicluster_tokens_total{kind="output"}'] == 30
    for name in ("ttft", "tpot", "handoff", "prefill_queue", "prefill", "e2e"):
        assert grown[f"minicluster_{name}_seconds_count"] == 5, name
    running = dict.fromkeys(cluster.replicas, 0.0)
    for name, value in after.items():
        for role in running:
            if name.startswith("minicluster_replicas{") and f'"running",role="{role}"' in name:
                running[role] += value
    assert running == cluster.replicas


@pytest.mark.prometheus
def test_every_query_of_the_dashboard_has_data_in_prometheus(
    cluster: Split, tmp_path: Path
) -> None:
    """A real Prometheus, which finds the endpoint by the configuration that is shipped."""
    queries = dashboard_queries()
    cluster.wait_until_whole()
    deadline_s = time.monotonic() + QUERIES_LIMIT_S

    with (
        Load(cluster.base_url, 2, tokens=100, max_tokens=8) as load,
        scraping(cluster.base_url, tmp_path) as prometheus,
    ):
        while lacking := [query for query in queries if not prometheus.ask(query)]:
            assert time.monotonic() < deadline_s, lacking
            time.sleep(1.0)
        running = prometheus.ask('minicluster_replicas{role="prefill", kind="running"}')
    assert all(reply.done for reply in load.replies)
    assert [*running.values()] == [cluster.replicas["prefill"]]


def test_a_prompt_that_nothing_computes(cluster: Split) -> None:
    """
    Failure 1c: no prefill engine moves: 504 at the prefill deadline.

    Once they move again nothing is left of the request, and others are answered by way of them.
    """
    cluster.wait_until_whole()
    replicas = [each["replica"] for each in cluster("inside")["prefill"]]
    cluster("fault", "prefill", "freeze", 1.5 * cluster.deadline_s, replicas)
    reply = send(f"{cluster.base_url}/v1/completions", body_of(200))
    assert refused(reply, 504, "prefill-timeout")
    assert cluster.deadline_s <= reply.seconds < 2 * cluster.deadline_s
    cluster.wait_until_released()
    again = send(f"{cluster.base_url}/v1/completions", body_of(201))
    assert (again.done, again.path) == (True, "remote")


def test_a_plan_for_gpus_is_deployed_as_planned(cluster: Split) -> None:
    """Verify finds no difference; status says what runs, and logs name the replicas."""
    verify = serving(cluster.place, "verify", "--json")
    assert verify.returncode == 0, verify.stderr
    assert json.loads(verify.stdout) == {"as_planned": True, "differences": [], "changes": []}
    status = json.loads(serving(cluster.place, "status", "--json").stdout)
    assert (status["base_url"], status["ready"]) == (cluster.base_url, True)
    assert status["answers"] is True
    assert [(each["role"], each["deployed"], each["healthy"]) for each in status["pools"]] == [
        (role, number, True) for role, number in cluster.replicas.items()
    ]
    said = serving(cluster.place, "status").stdout
    number = cluster.replicas["prefill"]
    assert f"prefill  {number} of {number} replicas, healthy" in said
    assert "simulated, 2 times slower" in said
    assert "Decode:demo" in serving(cluster.place, "logs", "-n", 1).stdout


def test_verify_notices_another_plan(cluster: Split) -> None:
    """If the plan says otherwise than what runs, verify names it and ends with 3."""
    stored = cluster.place / ".minicluster/serving/deployment.json"
    before = stored.read_text()
    plan = json.loads(before)
    plan["pools"][1]["max_num_seqs"] = 7
    try:
        stored.write_text(json.dumps(plan))
        verify = serving(cluster.place, "verify")
    finally:
        stored.write_text(before)
    assert verify.returncode == 3
    assert "decode[0].max_num_seqs: deployed 8, planned 7" in verify.stderr


def test_one_deployment_a_directory(cluster: Split) -> None:
    """A second `serving up` from the same place is refused and touches nothing."""
    [port] = free_ports(1)
    second = serving(cluster.place, "up", "plan.json", "--engine", "simulated", "--port", port)
    assert second.returncode == 2
    assert "serving down" in second.stderr
    assert answers(cluster.base_url)
