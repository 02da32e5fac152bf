"""Groups of data-parallel ranks that share their experts, as they are compiled and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from minicluster.engine_model.parallelism import expert_rule
from minicluster.errors import InputError
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Deployment, Pool
from minicluster.specs.slicing import Slicing
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget, engine_kwargs, planned_facts
from serving.deployment.feasibility import findings
from serving.deployment.manifest import FORMATS, manifest_text
from serving.deployment.target import Target
from serving.operations.scale import replica_changes
from serving.operations.status import Deployed, DeployedPool
from serving.operations.verify import differences
from serving.protocol.app_spec import CORES
from sizing import catalog
from tests.serving.plans import facts_of, make_deployment, make_plan, make_pool, places

GPU = DeployTarget(kind="gpu")


@pytest.fixture(scope="module")
def grouped(moe_model: Path) -> Deployment:
    """Return one prefill replica, and decode of two groups of two ranks on four cores."""
    cores = places(("laptop", (1, 2)), ("laptop", (3, 4)))
    decode = make_pool("decode", replicas=2, dp=2, ep=2, placement=cores)
    return make_deployment(moe_model, decode=decode)


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_every_rank_is_an_engine_of_its_own(grouped: Deployment, kind: str) -> None:
    """
    Each has its own core, its own queue in the endpoint, and vLLM's settings of its group.

    It is a replica of Ray Serve, or with the other simulated ranks of its group one.
    """
    replicas = 4 if kind == "cpu" else 2
    app = compile_app(grouped, DeployTarget(kind=kind), plan=make_plan(grouped))
    prefill, decode = app.pools
    assert (prefill.replicas, decode.replicas) == (1, replicas)
    assert app.endpoint.answering.replicas == {"d0": 4}
    assert app.endpoint.answering.max_num_seqs == grouped.pool("decode").max_num_seqs
    assert decode.llm_config["deployment_config"]["num_replicas"] == replicas
    kwargs = decode.llm_config["engine_kwargs"]
    assert (kwargs["data_parallel_size"], kwargs["enable_expert_parallel"]) == (2, True)
    assert not prefill.llm_config["engine_kwargs"].keys() & {
        "data_parallel_size",
        "enable_expert_parallel",
    }
    if kind == "cpu":
        assert decode.llm_config["runtime_env"]["env_vars"][CORES] == "1;2;3;4"
    else:
        assert decode.simulated is not None
        assert (len(decode.simulated.places), decode.simulated.ranks) == (2, 2)


def test_a_balancer_is_deployed_where_groups_hold_experts(
    grouped: Deployment, target: Target
) -> None:
    """Its copies are compared by `serving verify`; a CPU has none, which is a finding."""
    assert grouped.model.moe is not None
    model = replace(grouped.model, moe=replace(grouped.model.moe, redundant_experts=4))
    balanced = replace(grouped, model=model)
    prefill, decode = (engine_kwargs(balanced, pool, GPU) for pool in balanced.pools)
    assert decode["eplb_config"] == {"num_redundant_experts": 4}
    assert decode["enable_eplb"]
    without = engine_kwargs(grouped, grouped.pool("decode"), GPU)
    assert not {"enable_eplb", "eplb_config"} & {*prefill, *without}
    assert planned_facts(balanced, balanced.pool("decode"))["redundant_experts"] == 4
    assert planned_facts(balanced, balanced.pool("prefill"))["redundant_experts"] is None
    enough = replace(target, cores=frozenset(range(5)))
    [said] = findings(balanced, enough)
    assert "redundant_experts: 4; vLLM balances no experts on a CPU" in said


def test_two_batch_overlap_is_deployed_where_ranks_send_tokens(
    grouped: Deployment, target: Target
) -> None:
    """By DeepEP's kernels of the phase; verified; a CPU has none, and hosts need the package."""
    engine = replace(grouped.engine, all_to_all="deepep", two_batch_overlap=True)
    split = replace(grouped, engine=engine)
    prefill, decode = (engine_kwargs(split, pool, GPU) for pool in split.pools)
    assert (decode["all2all_backend"], decode["enable_dbo"]) == ("deepep_low_latency", True)
    without = engine_kwargs(grouped, grouped.pool("decode"), GPU)
    assert not {"all2all_backend", "enable_dbo"} & {*prefill, *without}
    wide = replace(split.pool("decode"), role="prefill")
    assert engine_kwargs(split, wide, GPU)["all2all_backend"] == "deepep_high_throughput"
    facts = planned_facts(split, split.pool("decode"))
    assert (facts["all_to_all_backend"], facts["two_batch_overlap"]) == ("deepep_low_latency", True)
    facts = planned_facts(split, split.pool("prefill"))
    assert facts["all_to_all_backend"] == "allgather_reducescatter"
    assert not facts["two_batch_overlap"]
    enough = replace(target, cores=frozenset(range(5)))
    [said] = findings(split, enough)
    assert "all_to_all: deepep; vLLM has it on NVIDIA GPUs alone (plan without all_to_all" in said
    hosts = replace(enough, kind="gpu", num_gpus=5, deep_ep=False)
    assert [each for each in findings(split, hosts) if "deep_ep is not installed" in each]
    assert not [each for each in findings(split, replace(hosts, deep_ep=True)) if "deep" in each]


def test_a_plan_with_groups_is_realisable_and_verified(grouped: Deployment, target: Target) -> None:
    """Each rank reports its group's degrees; another degree is a difference, as is a rank less."""
    enough = replace(target, cores=frozenset(range(5)))
    assert findings(grouped, enough) == ()
    prefill, decode = grouped.pools

    def reported(pool: Pool, core: int) -> dict[str, object]:
        labels = {ROLE_LABEL: pool.role, NODE_LABEL: "laptop"}
        return facts_of(grouped, pool) | {"labels": labels, "cores": [[core]]}

    facts = [reported(decode, core) for core in (1, 2, 3, 4)]
    running = {
        "prefill": DeployedPool(replicas=1, facts=[reported(prefill, 0)]),
        "decode": DeployedPool(replicas=4, facts=facts),
    }
    assert differences(grouped, Deployed(pools=running, answers=True), "cpu") == ()
    simulated = {**running, "decode": DeployedPool(replicas=2, facts=facts[::2])}
    assert differences(grouped, Deployed(pools=simulated, answers=True), "simulated") == ()
    running["decode"] = replace(running["decode"], replicas=3, facts=[facts[0] | {"dp": 1}])
    said = "\n".join(differences(grouped, Deployed(pools=running, answers=True), "cpu"))
    assert "decode.replicas: deployed 3, planned 4" in said
    assert "decode[0].dp: deployed 1, planned 2" in said


def test_manifests_have_the_gpus_of_all_ranks(grouped: Deployment) -> None:
    """Ray Serve gets the number of ranks, and the raylets of Kubernetes and compose their GPUs."""
    gpu = replace(grouped, pools=tuple(replace(each, gpu="h100-sxm") for each in grouped.pools))
    texts = {
        kind: manifest_text(make_plan(gpu), Path("plan.json"), kind, image="x") for kind in FORMATS
    }
    serve = yaml.safe_load(texts["ray-serve"])
    *_, service = yaml.safe_load_all(texts["kuberay"])
    for found in (serve, yaml.safe_load(service["spec"]["serveConfigV2"])):
        (application,) = found["applications"]
        assert [each["num_replicas"] for each in application["deployments"]] == [1, 4]
    limits = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    assert limits["decode-laptop"] == {"cpu": "4", "nvidia.com/gpu": "4"}
    services = yaml.safe_load(texts["compose"])["services"]
    (devices,) = services["decode-laptop"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["1", "2", "3", "4"]


def test_cores_may_be_shared_and_gpus_not(grouped: Deployment, target: Target) -> None:
    """Prefill and decode may name the same core of a laptop; a GPU has one engine."""
    shared = make_pool("decode", dp=2, ep=2, placement=places(("laptop", (0, 1))))
    both = replace(grouped, pools=(grouped.pools[0], shared))
    assert findings(both, target) == ()
    gpus = replace(target, kind="gpu", num_gpus=2)
    assert any("a GPU in two pools" in finding for finding in findings(both, gpus))


def test_groups_are_not_scaled(grouped: Deployment) -> None:
    """Ranks of a group start and end together, so a pool of groups keeps its size."""
    with pytest.raises(InputError, match="decode, groups of 2 engines"):
        replica_changes(grouped, grouped, {"decode": 1})


@pytest.mark.parametrize(
    ("model", "slicing", "says"),
    [
        ("deepseek-v3", Slicing(tp=8), None),
        ("deepseek-v3", Slicing(tp=1, dp=8, ep=8), None),
        ("deepseek-v3", Slicing(tp=4, dp=4, ep=16), None),
        ("deepseek-v3", Slicing(tp=1, dp=8, ep=1), None),
        ("deepseek-v3", Slicing(tp=2, dp=4, ep=2), "ep 1, or 8"),
        ("deepseek-v3", Slicing(tp=1, dp=3, ep=3), "divides the model's 256 experts"),
        ("mixtral-8x7b", Slicing(tp=1, dp=16, ep=16), "divides the model's 8 experts"),
        ("llama-3.1-70b", Slicing(tp=4, dp=2), "the model has no experts"),
        ("llama-3.1-70b", Slicing(tp=4, ep=4), "the model has no experts"),
        ("llama-3.1-70b", Slicing(tp=4), None),
    ],
)
def test_widths_of_groups(model: str, slicing: Slicing, says: str | None) -> None:
    """VLLM divides whole experts among all ranks, or slices each over them, and no dense model."""
    rule = expert_rule(catalog.find_model(model), slicing)
    assert rule is None if says is None else says in str(rule)


def test_ranks_add_up_to_all_experts(torch: ModuleType) -> None:
    """The sums of the ranks over their own experts are the sum over all experts."""
    from serving.replicas.vllm_plugin import own_experts  # noqa: PLC0415  (imports torch)

    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(50, 2, generator=generator)
    experts = torch.randint(0, 8, (50, 2), generator=generator)
    values = torch.rand(8, generator=generator)
    whole = (weights * values[experts]).sum(dim=1)
    total = torch.zeros(50)
    for rank in range(2):
        expert_map = torch.full((8,), -1)
        expert_map[4 * rank : 4 * rank + 4] = torch.arange(4)
        own_weights, own = own_experts(weights, experts, expert_map)
        total += (own_weights * values[4 * rank : 4 * rank + 4][own]).sum(dim=1)
    torch.testing.assert_close(total, whole)
    assert own_experts(weights, experts, None) == (weights, experts)
