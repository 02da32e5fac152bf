from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.plan import NODE_LABEL, ROLE_LABEL, Placement
from minicluster.specs.slo import SloSpec
from serving.deployment.compile import compile_app, domains, replica_devices
from serving.deployment.engine_args import DeployTarget, engine_kwargs
from serving.protocol.app_spec import CORES, DEVICES_LABEL, planned_cores
from serving.protocol.endpoint_config import from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minicluster.plan import Deployment, Plan
    from tests.serving.conftest import DeploymentMaker, PlanMaker, PoolMaker

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = DeployTarget(kind="cpu")


def _gpu_deployment(
    small_model: Path, make_deployment: DeploymentMaker, make_pool: PoolMaker
) -> Deployment:
    """Return two TP 2 prefill replicas on node-0, a TP 4 decode replica on node-1."""
    prefill = make_pool(
        "prefill",
        replicas=2,
        tp=2,
        gpu="h100-sxm",
        ray_accelerator="H100",
        placement=(Placement(node="node-0", gpus=(0, 1)), Placement(node="node-0", gpus=(2, 3))),
    )
    decode = make_pool(
        "decode",
        tp=4,
        gpu="h100-sxm",
        ray_accelerator="H100",
        placement=(Placement(node="node-1", gpus=(0, 1, 2, 3)),),
    )
    deployment = make_deployment(small_model, prefill=prefill, decode=decode)
    hub = replace(deployment.model, source="a-hub/a-model")
    return replace(deployment, model=hub)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_plan_compiles_to_these_options(
    small_model: Path,
    make_deployment: DeploymentMaker,
    make_pool: PoolMaker,
    make_plan: PlanMaker,
    target: str,
) -> None:
    """
    Ray Serve and vLLM are given the options in tests/serving/golden, no other and none less.

    `GOLDEN=write` rewrites the files; their difference is to be reviewed line by line.
    """
    if target == "cpu":
        deployment = make_deployment(small_model)
        machines = CPU
    else:
        deployment = _gpu_deployment(small_model, make_deployment, make_pool)
        machines = DeployTarget(kind="gpu", one_host=False)
    app = compile_app(deployment, machines, plan=make_plan(deployment).under(slo=SloSpec()))
    said = {"nodes": app.nodes, "pools": {pool.role: asdict(pool) for pool in app.pools}}
    text = json.dumps(said, default=asdict).replace(str(small_model), "MODEL")
    flat = dict(_flat(json.loads(text)))
    path = GOLDEN / f"{target}.json"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")
    assert flat == json.loads(path.read_text(encoding="utf-8"))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Name each number and string of a JSON value by where it stands."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def test_the_endpoint_gets_the_plan(
    small_model: Path, make_deployment: DeploymentMaker, make_plan: PlanMaker
) -> None:
    """Each prediction under its own name, the load, limits, steps, and the sizes of the pools."""
    plan = make_plan(make_deployment(small_model))
    said = plan.prediction
    told = {
        name: replace(said.ttft, mean_s=mean_s)
        for mean_s, name in enumerate(("ttft", "tpot", "itl", "e2e"), start=1)
    }
    plan = replace(plan, prediction=replace(said, **told))
    config = compile_app(plan.deployment, CPU, plan=plan).endpoint
    assert config.prediction is not None
    promised = asdict(config.prediction)
    assert {name: promised[name]["mean_s"] for name in told} == {
        "ttft": 1,
        "tpot": 2,
        "itl": 3,
        "e2e": 4,
    }
    assert (promised["capacity_requests_per_s"], config.confidence_fraction) == (2.0, None)
    assert promised["utilisation_fraction"] == {"prefill": 0.5, "decode": 0.5}
    assert promised["ttft_parts_s"] == {"prefill": 0.1}
    assert config.workload == plan.workload
    assert (config.slo, config.step_model) == (plan.slo, plan.step_model)
    assert (config.model_id, config.max_model_len, config.block_size) == ("demo", 2048, 32)
    assert config.routing == plan.routing
    assert config.pairing == {"d0": ("d0",)}
    sizes = [(pool.role, pool.replicas, pool.max_num_seqs) for pool in config.pools]
    assert sizes == [("prefill", {"d0": 1}, 4), ("decode", {"d0": 1}, 16)]


def test_decode_consumes_and_recovers(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """Decode consumes, prefills for itself what it could not fetch, and has its own ports."""
    (decode,) = compile_app(make_deployment(small_model), CPU).of("decode")
    transfer = decode.llm_config["engine_kwargs"]["kv_transfer_config"]
    assert transfer["kv_role"] == "kv_consumer"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert decode.llm_config["experimental_configs"]["NIXL_SIDE_CHANNEL_PORT_BASE"] == 22000


def test_same_deployment_same_app(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """Compiling is a function: equal input, equal JSON."""
    first, second = (compile_app(make_deployment(small_model), CPU) for _ in range(2))
    assert json.dumps(asdict(first)) == json.dumps(asdict(second))


def test_scheduler_limits_are_deployed(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """Chunks, memory share and blocks reach vLLM; without a chunk size vLLM's default stays."""
    plain = make_deployment(small_model)
    limits = {"chunked_prefill_tokens": 512, "gpu_memory_utilization": 0.5, "block_size": 64}
    limited = replace(plain, engine=replace(plain.engine, **limits))
    for pool in plain.pools:
        kwargs = engine_kwargs(limited, pool, DeployTarget(kind="gpu"))
        assert kwargs["long_prefill_token_threshold"] == 512
        assert (kwargs["gpu_memory_utilization"], kwargs["block_size"]) == (0.5, 64)
        assert "long_prefill_token_threshold" not in engine_kwargs(
            plain, pool, DeployTarget(kind="gpu")
        )


def test_across_hosts_no_shared_memory(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """Between hosts only TCP is offered, with a lease short enough to keep prefill moving."""
    app = compile_app(make_deployment(small_model), DeployTarget(kind="cpu", one_host=False))
    config = app.of("prefill")[0].llm_config
    assert config["runtime_env"]["env_vars"]["UCX_TLS"] == "tcp,self"
    extra = config["engine_kwargs"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["kv_lease_duration"] == 4


def test_a_mixed_pool_hands_nothing_over(
    small_model: Path, make_deployment: DeploymentMaker, make_pool: PoolMaker, make_plan: PlanMaker
) -> None:
    """An aggregated plan is one deployment that answers, without any KV transfer."""
    pools = (make_pool("mixed", (0, 1), replicas=2),)
    deployment = replace(make_deployment(small_model), pools=pools)
    app = compile_app(deployment, CPU, plan=make_plan(deployment))
    assert [(pool.role, pool.name, pool.replicas) for pool in app.servers] == [
        ("mixed", "Mixed:demo", 2)
    ]
    assert "kv_transfer_config" not in app.servers[0].llm_config["engine_kwargs"]
    assert not app.endpoint.split
    assert app.endpoint.pairing == {"d0": ()}


def _two_nodes(make_plan: PlanMaker, deployment: Deployment, per_domain: int) -> Plan:
    """Return a plan of nodes of four GPUs, *per_domain* of which are one scale-up domain."""
    plan = make_plan(deployment)
    cluster = replace(
        plan.inputs.cluster, gpus_per_node=4, gpus_per_hb_domain=per_domain, max_gpus=16
    )
    return replace(plan, inputs=replace(plan.inputs, cluster=cluster))


@pytest.fixture
def paired(small_model: Path, make_deployment: DeploymentMaker, make_pool: PoolMaker) -> Deployment:
    """Return two nodes, each with a prefill and a decode replica."""
    pools = {
        role: make_pool(
            role,
            replicas=2,
            placement=tuple(Placement(node=f"node-{n}", gpus=(core,)) for n in (0, 1)),
        )
        for role, core in (("prefill", 0), ("decode", 1))
    }
    return make_deployment(small_model, **pools)


def test_a_deployment_for_each_domain(paired: Deployment, make_plan: PlanMaker) -> None:
    """Where domains hold both roles each gets its own deployments, and pairs inside come first."""
    app = compile_app(paired, CPU, plan=_two_nodes(make_plan, paired, 4))
    assert [(pool.name, pool.domain, pool.replicas) for pool in app.pools] == [
        ("Prefill-d0:demo", "d0", 1),
        ("Prefill-d1:demo", "d1", 1),
        ("Decode-d0:demo", "d0", 1),
        ("Decode-d1:demo", "d1", 1),
    ]
    assert app.endpoint.pairing == {"d0": ("d0", "d1"), "d1": ("d1", "d0")}
    selectors = [_selector(pool)[NODE_LABEL] for pool in app.pools]
    assert selectors == ["in(node-0)", "in(node-1)"] * 2
    ports = [
        pool.llm_config["experimental_configs"]["NIXL_SIDE_CHANNEL_PORT_BASE"] for pool in app.pools
    ]
    assert len(set(ports)) == 4
    assert [pool.llm_config["runtime_env"]["env_vars"][CORES] for pool in app.pools] == [
        *("0", "0"),
        *("1", "1"),
    ]


@pytest.mark.parametrize("change", ["wide domain", "no plan", "other names", "apart"])
def test_one_domain_where_domains_decide_nothing(
    paired: Deployment, make_plan: PlanMaker, change: str
) -> None:
    """One domain: all nodes in it, none known, or roles that share none anyway."""
    plan: Plan | None = _two_nodes(make_plan, paired, 8 if change == "wide domain" else 4)
    if change == "no plan":
        plan = None
    elif change == "other names":
        paired = _renamed(paired, lambda role, node: f"rack-{role}-{node}")
    elif change == "apart":
        paired = _renamed(paired, lambda role, node: f"node-{role == 'decode':d}{node[-1]}")
    assert set(domains(paired, plan).values()) == {"d0"}


def test_one_domain_where_shares_differ(
    paired: Deployment, make_plan: PlanMaker, make_pool: PoolMaker
) -> None:
    """Two prefill replicas apart from the only decode replica have work, too."""
    cores = ((0, 0), (0, 1), (1, 0))
    places = tuple(Placement(node=f"node-{n}", gpus=(core,)) for n, core in cores)
    prefill = make_pool("prefill", replicas=3, placement=places)
    decode = make_pool("decode", placement=(Placement(node="node-1", gpus=(1,)),))
    deployment = replace(paired, pools=(prefill, decode))
    app = compile_app(deployment, CPU, plan=_two_nodes(make_plan, deployment, 4))
    assert [(pool.role, pool.domain, pool.replicas) for pool in app.pools] == [
        ("prefill", "d0", 3),
        ("decode", "d0", 1),
    ]


def _renamed(deployment: Deployment, name: Callable[[str, str], str]) -> Deployment:
    """Return the deployment on nodes of other names."""
    return replace(
        deployment,
        pools=tuple(
            replace(
                pool,
                placement=tuple(
                    replace(place, node=name(pool.role, place.node)) for place in pool.placement
                ),
            )
            for pool in deployment.pools
        ),
    )


def _selector(pool: Any) -> dict[str, str]:  # noqa: ANN401
    """Return where the pool's replicas must be."""
    selector: dict[str, str]
    (selector,) = pool.llm_config["deployment_config"]["placement_group_bundle_label_selector"]
    assert selector[ROLE_LABEL] == pool.role
    return selector


def test_queues_end_where_the_deadline_does(
    small_model: Path, make_deployment: DeploymentMaker, make_plan: PlanMaker
) -> None:
    """A replica takes its batch and the 120 requests that it can serve in 60 s, twice the TTFT."""
    deployment = make_deployment(small_model)
    app = compile_app(deployment, CPU, plan=make_plan(deployment))
    options = {pool.role: pool.llm_config["deployment_config"] for pool in app.pools}
    assert {role: each["max_ongoing_requests"] for role, each in options.items()} == {
        "prefill": 4 + 120,
        "decode": 16 + 120,
    }
    assert all(
        each["max_queued_requests"] == each["max_ongoing_requests"] for each in options.values()
    )
    assert app.endpoint.prefill_deadline_s == app.endpoint.kv_wait_deadline_s == 60.0


def test_deadlines_that_an_operator_sets(
    small_model: Path, make_deployment: DeploymentMaker, make_plan: PlanMaker
) -> None:
    """A deadline given is kept to; the other one stays the plan's."""
    deployment = make_deployment(small_model)
    plan = make_plan(deployment)
    config = compile_app(
        deployment, DeployTarget(kind="cpu", deadlines_s=(None, 3.0)), plan=plan
    ).endpoint
    assert (config.prefill_deadline_s, config.kv_wait_deadline_s) == (60.0, 3.0)


def test_a_substitution_keeps_no_promise(
    small_model: Path, make_deployment: DeploymentMaker, make_plan: PlanMaker
) -> None:
    """What is deployed otherwise than planned says so, and promises nothing of the plan's."""
    deployment = make_deployment(small_model)
    app = compile_app(deployment, CPU, plan=make_plan(deployment), substitutions=("tp: 2",))
    assert app.endpoint.substitutions == ("tp: 2",)
    assert app.endpoint.prediction is None
    assert app.endpoint.slo is None


def test_the_endpoint_reads_what_was_compiled(
    small_model: Path, make_deployment: DeploymentMaker, make_plan: PlanMaker
) -> None:
    """What crosses to the endpoint as plain data comes back as the same value."""
    deployment = make_deployment(small_model)
    for plan in (None, make_plan(deployment)):
        config = compile_app(deployment, CPU, plan=plan).endpoint
        assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


def test_cores_of_a_replica() -> None:
    """A replica has the cores of its rank, unless its raylet was moved: then those it is told."""
    assert planned_cores("0|1;2|3", 1, {}) == "2|3"
    assert planned_cores("0|1;2|3", 2, {DEVICES_LABEL: "5_6"}) == "5|6"


@given(
    replicas=st.integers(1, 6),
    tp=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 512),
    tokens=st.integers(512, 16384),
    kv_bytes=st.floats(1e6, 1e12),
)
def test_plan_decides_every_number(  # noqa: PLR0913, PLR0917  (one argument a number)
    small_model: Path,
    make_deployment: DeploymentMaker,
    make_pool: PoolMaker,
    replicas: int,
    tp: int,
    batch: int,
    tokens: int,
    kv_bytes: float,
) -> None:
    """Replicas, TP, batch limits and KV bytes are those of the plan, and raylets hold its cores."""
    count = replicas * tp
    decode = make_pool(
        "decode",
        replicas=replicas,
        tp=tp,
        max_num_seqs=batch,
        max_num_batched_tokens=tokens,
        kv_bytes=kv_bytes,
        placement=tuple(
            Placement(node=f"n{i % 2}", gpus=tuple(range(1 + i * tp, 1 + (i + 1) * tp)))
            for i in range(replicas)
        ),
    )
    app = compile_app(make_deployment(small_model, decode=decode), CPU)
    config = app.of("decode")[0].llm_config
    assert config["deployment_config"]["num_replicas"] == replicas
    assert config["engine_kwargs"]["tensor_parallel_size"] == tp
    assert config["engine_kwargs"]["max_num_seqs"] == batch
    assert config["engine_kwargs"]["max_num_batched_tokens"] == tokens
    assert config["engine_kwargs"]["kv_cache_memory_bytes"] == int(kv_bytes)
    cores = config["runtime_env"]["env_vars"][CORES]
    assert [len(replica.split("|")) for replica in cores.split(";")] == [tp] * replicas
    held = [core for node in app.nodes if node.role == "decode" for core in node.cores]
    assert sorted(held) == list(range(1, 1 + count))
    assert [core for replica in replica_devices(decode) for core in replica] == [
        core for placement in decode.placement for core in placement.gpus
    ]
