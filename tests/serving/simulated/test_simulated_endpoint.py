"""A deployment's commands and its endpoint, where it does not matter what computes the tokens."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from loadtest.client.endpoint import served_models
from tests.serving.client import begin, post, send
from tests.serving.command import serving
from tests.serving.deployed import Split, series
from tests.serving.faults.load import Load, body_of, refused
from tests.serving.prometheus import dashboard_queries, scraping
from tests.waiting import until

from .conftest import GROUPS, RANKS

pytestmark = pytest.mark.simulated

QUERIES_LIMIT_S = 100.0
"""Within which every query has data: a rate needs two scrapes, a second apart."""

LEAVERS = 16


def test_up_says_where_it_serves(cluster: Split) -> None:
    said = (cluster.place / "up.txt").read_text()
    assert f"ready: {cluster.base_url}/v1 serves demo" in said
    assert "serving down" in said


def test_no_other_user_reaches_ray_s_files(cluster: Split) -> None:
    """Ray lets every user write into its folder, so the one around it is its owner's alone."""
    state = json.loads((cluster.place / ".minicluster/serving/state.json").read_text())
    session = Path(state["session"])
    assert (session / "session_latest" / "sockets").is_dir()
    around = session.parent.stat()
    assert (around.st_mode & 0o777, around.st_uid) == (0o700, os.getuid())


def test_what_vllm_refuses_is_refused(cluster: Split) -> None:
    """Malformed prompts and options of a stream are the client's error, whatever the engine is."""
    bodies: list[tuple[str, str, dict[str, object]]] = [
        *(("completions", "prompt", {"prompt": bad}) for bad in ([1, 2.5], [[1, "a"]], 5, False)),
        ("completions", "prompt", {"prompt": [-(2**63) - 1]}),
        ("completions", "stream_options", {"stream_options": {"include_usage": True}}),
        ("completions", "stream_options", {"stream": True, "stream_options": "abc"}),
        ("completions", "top_k", {"top_k": 2**64}),
        *(("chat/completions", "messages", {"messages": bad}) for bad in ([1], "abc")),
    ]
    for path, param, body in bodies:
        given = {"prompt": "a", "max_tokens": 1} | body
        status, answer = post(f"{cluster.base_url}/v1/{path}", given)
        assert (status, answer["error"]["param"]) == (400, param), (body, answer)
    status, answer = post(f"{cluster.base_url}/v1/completions", {"prompt": [1.0, 2], "n": 1})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)


def test_clients_that_leave_take_nothing_with_them(cluster: Split) -> None:
    """
    Wherever their prompts are then: no engine holds any of it, and no replica is replaced.

    A pull without an end would keep its decode replica from being healthy after two minutes.
    """
    cluster.wait_until_whole()
    before = _inside(cluster)
    for number in range(LEAVERS):
        body = body_of(300 + number, tokens=200, max_tokens=24)
        with begin(cluster.base_url, body):
            time.sleep(0.05 * (number % 16))
    cluster.wait_until_released()
    until(lambda: sum(_inside(cluster).values()) == 0, "nothing is inside")
    assert _inside(cluster).keys() == before.keys()


def _inside(cluster: Split) -> dict[tuple[str, int], int]:
    """Return the KV blocks and requests in each replica, by its name and process."""
    replicas = [each for role in cluster("inside").values() for each in role]
    held = ("running", "waiting", "kv_blocks")
    return {(each["replica"], each["pid"]): sum(each[of] for of in held) for each in replicas}


@pytest.mark.prometheus
def test_every_query_of_the_dashboard_has_data_in_prometheus(
    cluster: Split, tmp_path: Path
) -> None:
    """A real Prometheus, which finds the endpoint by the configuration that is shipped."""
    queries = dashboard_queries()
    cluster.wait_until_whole()
    cluster.wait_until_released()
    deadline_s = time.monotonic() + QUERIES_LIMIT_S

    with (
        # One client: an idle cluster admits it, whatever admission learned in other tests (eq. G5).
        Load(cluster.base_url, 1, tokens=100, max_tokens=8) as load,
        scraping(cluster.base_url, tmp_path) as prometheus,
    ):
        while lacking := [query for query in queries if not prometheus.ask(query)]:
            assert time.monotonic() < deadline_s, lacking
            time.sleep(1.0)
        running = prometheus.ask('minicluster_replicas{role="prefill", kind="running"}')
    assert load.replies
    assert [reply for reply in load.replies if not reply.done] == []
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
    engines = {"prefill": cluster.replicas["prefill"], "decode": GROUPS * RANKS}
    assert [(each["role"], each["deployed"], each["healthy"]) for each in status["pools"]] == [
        (role, number, True) for role, number in engines.items()
    ]
    seen = series(cluster.base_url)
    for role, number in engines.items():
        assert seen[f'minicluster_replicas{{domain="d0",kind="running",role="{role}"}}'] == number
    said = serving(cluster.place, "status").stdout
    number = cluster.replicas["prefill"]
    assert f"prefill  {number} of {number} replicas, healthy" in said
    ranks = engines["decode"]
    assert f"decode   {ranks} of {ranks} ranks in {GROUPS} groups, healthy" in said
    assert "simulated, 2 times slower" in said
    assert served_models(cluster.base_url)[1] == 2  # what `loadtest` makes of each answer's header
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
