"""The words of `serving verify` and `status`: as planned, not as planned, silent; and of groups."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from minicluster.errors import NegativeAnswer
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Deployment, Plan
from serving.cli import inspect
from serving.cluster import connection, serve_compat
from serving.operations import status
from serving.operations.status import Deployed, DeployedPool
from serving.operations.verify import differences
from tests.serving.plans import deployed, facts_of, make_pool


@pytest.fixture
def as_planned(deployment: Deployment) -> Deployed:
    """Return what two engines say that run as the demo's plan wants."""
    pools = {}
    for core, pool in enumerate(deployment.pools):
        place = {"labels": {ROLE_LABEL: pool.role, NODE_LABEL: "laptop"}, "cores": [[core]]}
        pools[pool.role] = DeployedPool(replicas=1, facts=[facts_of(deployment, pool) | place])
    return Deployed(pools=pools, answers=True)


@pytest.mark.parametrize(
    ("fact", "value", "says"),
    [
        ("tp", 2, "decode[0].tp: deployed 2, planned 1"),
        ("max_num_seqs", 8, "decode[0].max_num_seqs: deployed 8, planned 16"),
        ("chunked_prefill_tokens", 512, "chunked_prefill_tokens: deployed 512, planned 0"),
        ("gpu_memory_utilization", 0.5, "decode[0].gpu_memory_utilization: deployed 0.5"),
        ("kv_bytes", 1, "decode[0].kv_bytes: deployed 1, planned 268435456"),
        ("dtype", "float32", "decode[0].dtype: deployed float32, planned bfloat16"),
        ("labels", {ROLE_LABEL: "decode", NODE_LABEL: "x"}, "decode.nodes: deployed ['x']"),
        ("labels", {ROLE_LABEL: "prefill", NODE_LABEL: "laptop"}, "decode.labels"),
        ("cores", [[0, 1]], "decode.cores: workers bound to [[[0, 1]]], planned [[[1]]]"),
    ],
)
def test_each_difference_is_named(
    deployment: Deployment, as_planned: Deployed, fact: str, value: object, says: str
) -> None:
    """Any fact that is not as planned is reported with both values; without one, nothing is."""
    assert differences(deployment, as_planned, "cpu") == ()
    as_planned.pools["decode"].facts[0][fact] = value
    (found,) = differences(deployment, as_planned, "cpu")
    assert says in found
    # A GPU's replicas report no cores.
    assert len(differences(deployment, as_planned, "gpu")) == (fact != "cores")


def test_limits_and_replicas_are_compared(deployment: Deployment, as_planned: Deployed) -> None:
    """An option of Ray Serve that is not what was compiled, and a replica that is gone."""
    options = {"Decode:demo": {"max_ongoing_requests": 7}}
    bounds = {"decode": {"max_ongoing_requests": 20}}
    decode = replace(as_planned.pools["decode"], options=options, replicas=0)
    changed = replace(as_planned, pools=as_planned.pools | {"decode": decode})
    assert differences(deployment, changed, "cpu", bounds) == (
        "decode.replicas: deployed 0, planned 1",
        "Decode:demo.max_ongoing_requests: deployed 7, planned 20",
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have a cluster with no prefill replica, and one decode replica that says nothing."""
    deployments = {
        name: SimpleNamespace(replica_states=states, status=SimpleNamespace(value=value))
        for name, states, value in (
            ("Prefill-d0:demo", {}, "HEALTHY"),
            ("Prefill-d1:demo", {"STARTING": 1}, "UNHEALTHY"),
            ("Decode:demo", {"RUNNING": 1}, "HEALTHY"),
        )
    }
    app = SimpleNamespace(deployments=deployments)
    asked: list[str] = []

    def handle(name: str, _app: str) -> Any:  # noqa: ANN401
        def result(*, timeout_s: float) -> None:
            assert timeout_s > 0
            asked.append(name)
            raise TimeoutError

        response = SimpleNamespace(result=result, cancel=lambda: asked.append("no more"))
        return SimpleNamespace(facts=SimpleNamespace(remote=lambda: response))

    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={status.APP: app}))
    monkeypatch.setattr(serve, "get_deployment_handle", handle)
    monkeypatch.setattr(connection, "connected", lambda _address: nullcontext())
    options: dict[str, object] = {name: {} for name in deployments}
    monkeypatch.setattr(serve_compat, "deployment_options", lambda _app: options)
    monkeypatch.setattr(status, "_answers", lambda _url: True)
    return asked


def test_verify_lists_what_does_not_run_or_answer(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plan: Plan,
) -> None:
    """Pools without replicas are not queried, silence is a difference, and the exit code is 3."""
    monkeypatch.chdir(tmp_path)
    state = deployed(plan, planned=False)
    monkeypatch.setattr(status, "current", lambda: state)
    with pytest.raises(NegativeAnswer) as negative:
        inspect.verify(as_json=True)
    assert negative.value.exit_code == 3
    found = json.loads(capsys.readouterr().out)["differences"]
    assert "prefill.replicas: deployed 0, planned 1" in found
    assert "Decode:demo.facts: not reported within 30 s, so not compared" in found
    # Settings that were not reported are no differences.
    assert not any(each.startswith("decode.") for each in found)
    assert asked == ["Decode:demo", "no more"]
    assert status.cluster_status(state).pool("prefill").status == "UNHEALTHY"  # the worst


@pytest.mark.parametrize(
    ("replicas", "dp", "said"),
    [(3, 1, "3 replicas"), (1, 8, "8 ranks in 1 group"), (2, 4, "8 ranks in 2 groups")],
)
def test_engines_of_groups_are_ranks_and_others_replicas(replicas: int, dp: int, said: str) -> None:
    pool = make_pool("decode", tuple(range(replicas * dp)), replicas=replicas, dp=dp, ep=dp)
    assert inspect.planned_engines(pool) == said
