from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from minicluster.engine_model.planned_limits import planned_limits
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Deployment, Plan
from minicluster.specs.slo import SloSpec
from serving.deployment.compile import compile_app, domains
from serving.deployment.engine_args import (
    MEDIA_DOMAINS,
    NO_MEDIA,
    DeployTarget,
    read_media_domains,
)
from serving.protocol.app_spec import CORES, DEVICES_LABEL, planned_cores
from serving.protocol.messages import from_plain, to_plain
from tests.serving.plans import make_deployment, make_plan, make_pool, places

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = DeployTarget(kind="cpu")


def _on_gpus(deployment: Deployment) -> Deployment:
    """Return two TP 2 prefill replicas on node-0, a TP 4 decode replica on node-1."""
    h100 = {"gpu": "h100-sxm", "ray_accelerator": "H100"}
    two = places(("node-0", (0, 1)), ("node-0", (2, 3)))
    prefill = make_pool("prefill", replicas=2, tp=2, placement=two, **h100)
    decode = make_pool("decode", tp=4, placement=places(("node-1", (0, 1, 2, 3))), **h100)
    model = replace(deployment.model, source="a-hub/a-model")
    return replace(deployment, model=model, pools=(prefill, decode))


def _on_cores(deployment: Deployment) -> Deployment:
    """Return two TP 2 decode replicas beside the prefill replica, each on a node of its own."""
    two = places(("laptop", (1, 2)), ("second", (3, 4)))
    limits = {"max_num_seqs": 7, "max_num_batched_tokens": 513, "kv_bytes": 1e8 + 0.5}
    decode = make_pool("decode", replicas=2, tp=2, placement=two, **limits)
    engine = replace(deployment.engine, chunked_prefill_tokens=512, gpu_memory_utilization=0.5)
    return replace(deployment, engine=engine, pools=(deployment.pools[0], decode))


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_plan_compiles_to_these_options(deployment: Deployment, target: str) -> None:
    """
    Ray Serve and vLLM are given the options in tests/serving/golden, no other and none less.

    `GOLDEN=write` rewrites the files; their difference is to be reviewed line by line.
    """
    machines, model = CPU, deployment.model.source
    if target == "gpu":
        deployment = _on_gpus(deployment)
        machines = DeployTarget(kind="gpu", one_host=False)
    else:
        deployment = _on_cores(deployment)
    app = compile_app(deployment, machines, plan=make_plan(deployment).under(slo=SloSpec()))
    said = {"nodes": app.nodes, "pools": {pool.role: asdict(pool) for pool in app.pools}}
    text = json.dumps(said, default=asdict).replace(model, "MODEL")
    flat = dict(_flat(json.loads(text)))
    path = GOLDEN / f"{target}.json"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")
    assert flat == json.loads(path.read_text(encoding="utf-8"))
    again = compile_app(deployment, machines, plan=make_plan(deployment).under(slo=SloSpec()))
    assert json.dumps(asdict(app)) == json.dumps(asdict(again))


@pytest.mark.parametrize(
    ("named", "allowed"), [("a.example, b.example", ["a.example", "b.example"]), ("", None)]
)
def test_engines_fetch_from_named_hosts_only(
    deployment: Deployment, named: str, allowed: list[str] | None
) -> None:
    """Without a name vLLM has one that is no host's: it takes an empty list for any host."""
    target = replace(CPU, media_domains=read_media_domains({MEDIA_DOMAINS: named}))
    for pool in compile_app(deployment, target).pools:
        given = pool.llm_config["engine_kwargs"]["allowed_media_domains"]
        assert given == (allowed or [*NO_MEDIA])
    assert all(name.endswith(".invalid") for name in NO_MEDIA)


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Name each number and string of a JSON value by where it stands."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def test_the_endpoint_gets_the_plan(plan: Plan) -> None:
    """Each prediction under its own name, the load, limits, steps, and the sizes of the pools."""
    names = ("ttft", "tpot", "itl", "e2e")
    told = {
        name: replace(plan.prediction.ttft, mean_s=mean_s)
        for mean_s, name in enumerate(names, start=1)
    }
    prediction = replace(plan.prediction, **told)
    config = compile_app(plan.deployment, CPU, plan=replace(plan, prediction=prediction)).endpoint
    assert config.prediction == prediction
    assert (config.workload, config.confidence_fraction) == (plan.workload, None)
    assert (config.slo, config.step_model) == (plan.slo, plan.step_model)
    assert (config.model_id, config.max_model_len, config.block_size) == ("demo", 2048, 32)
    assert (config.routing, config.pairing) == (plan.routing, {"d0": ("d0",)})
    sizes = [(pool.role, pool.replicas, pool.max_num_seqs) for pool in config.pools]
    assert sizes == [("prefill", {"d0": 1}, 4), ("decode", {"d0": 1}, 16)]
    for config in (config, compile_app(plan.deployment, CPU).endpoint):  # noqa: B020
        assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


def test_across_hosts_no_shared_memory(deployment: Deployment) -> None:
    """Between hosts only TCP is offered, with a lease short enough to keep prefill moving."""
    [pool] = compile_app(deployment, DeployTarget(kind="cpu", one_host=False)).of("prefill")
    assert pool.llm_config["runtime_env"]["env_vars"]["UCX_TLS"] == "tcp,self"
    transfer = pool.llm_config["engine_kwargs"]["kv_transfer_config"]
    assert transfer["kv_connector_extra_config"]["kv_lease_duration"] == 4


def test_a_mixed_pool_hands_nothing_over(deployment: Deployment) -> None:
    """An aggregated plan is one deployment that answers, without any KV transfer."""
    deployment = replace(deployment, pools=(make_pool("mixed", (0, 1), replicas=2),))
    app = compile_app(deployment, CPU)
    [pool] = app.servers
    assert (pool.role, pool.name, pool.replicas) == ("mixed", "Mixed:demo", 2)
    assert "kv_transfer_config" not in pool.llm_config["engine_kwargs"]
    assert (app.endpoint.split, app.endpoint.pairing) == (False, {"d0": ()})


@pytest.mark.parametrize("role", ["prefill", "mixed"])
def test_a_router_by_prefix_knows_the_room_for_prefixes(deployment: Deployment, role: str) -> None:
    """Where prompts are computed it gets the tokens of a replica's KV cache; decode has none."""
    routing = replace(deployment.routing, policy="prefix-aware")
    pools = deployment.pools if role == "prefill" else (make_pool("mixed", (0, 1), replicas=2),)
    deployment = replace(deployment, routing=routing, pools=pools)
    told = compile_app(deployment, CPU).endpoint.pools
    routed = {pool.role: (pool.policy, pool.cached_tokens) for pool in told}
    room = planned_limits(deployment, deployment.pool(role)).max_tokens
    assert routed.pop(role) == ("prefix-aware", room)
    assert {*routed.values()} <= {("power-of-two", 0)}


def _two_nodes(deployment: Deployment, per_domain: int) -> Plan:
    """Return a plan of nodes of four GPUs, *per_domain* of which are one scale-up domain."""
    plan = make_plan(deployment)
    sizes = {"gpus_per_node": 4, "gpus_per_hb_domain": per_domain, "max_gpus": 16}
    cluster = replace(plan.inputs.cluster, **sizes)
    return replace(plan, inputs=replace(plan.inputs, cluster=cluster))


@pytest.fixture
def paired(small_model: Path) -> Deployment:
    """Return two nodes, each with a prefill and a decode replica."""
    pools = {
        role: make_pool(
            role, replicas=2, placement=places(("node-0", (core,)), ("node-1", (core,)))
        )
        for role, core in (("prefill", 0), ("decode", 1))
    }
    return make_deployment(small_model, **pools)


def test_a_deployment_for_each_domain(paired: Deployment) -> None:
    """Where domains hold both roles each gets its own deployments, and pairs inside come first."""
    app = compile_app(paired, CPU, plan=_two_nodes(paired, 4))
    assert [(pool.name, pool.domain, pool.replicas) for pool in app.pools] == [
        ("Prefill-d0:demo", "d0", 1),
        ("Prefill-d1:demo", "d1", 1),
        ("Decode-d0:demo", "d0", 1),
        ("Decode-d1:demo", "d1", 1),
    ]
    assert app.endpoint.pairing == {"d0": ("d0", "d1"), "d1": ("d1", "d0")}
    ports = set()
    for pool, core in zip(app.pools, "0011", strict=True):
        config = pool.llm_config
        [selector] = config["deployment_config"]["placement_group_bundle_label_selector"]
        assert selector == {ROLE_LABEL: pool.role, NODE_LABEL: f"in(node-{pool.domain[1]})"}
        assert config["runtime_env"]["env_vars"][CORES] == core
        ports.add(config["experimental_configs"]["NIXL_SIDE_CHANNEL_PORT_BASE"])
    assert len(ports) == 4


@pytest.mark.parametrize("change", ["wide domain", "no plan", "other names", "apart", "shares"])
def test_one_domain_where_domains_decide_nothing(paired: Deployment, change: str) -> None:
    """One domain: all nodes in it, none known, or roles that share none, or share it unevenly."""
    plan: Plan | None = _two_nodes(paired, 8 if change == "wide domain" else 4)
    if change == "no plan":
        plan = None
    elif change == "other names":
        paired = _renamed(paired, lambda role, node: f"rack-{role}-{node}")
    elif change == "apart":
        paired = _renamed(paired, lambda role, node: f"node-{role == 'decode':d}{node[-1]}")
    elif change == "shares":
        three = places(("node-0", (0,)), ("node-0", (1,)), ("node-1", (0,)))
        prefill = make_pool("prefill", replicas=3, placement=three)
        decode = make_pool("decode", placement=places(("node-1", (1,))))
        paired = replace(paired, pools=(prefill, decode))
    assert set(domains(paired, plan).values()) == {"d0"}


def _renamed(deployment: Deployment, name: Callable[[str, str], str]) -> Deployment:
    pools = tuple(
        replace(
            pool,
            placement=places(*((name(pool.role, at.node), at.gpus) for at in pool.placement)),
        )
        for pool in deployment.pools
    )
    return replace(deployment, pools=pools)


def test_cores_of_a_replica() -> None:
    """A replica has the cores of its rank, unless its raylet was moved: then those it is told."""
    assert planned_cores("0|1;2|3", 1, {}) == "2|3"
    assert planned_cores("0|1;2|3", 2, {DEVICES_LABEL: "5_6"}) == "5|6"
