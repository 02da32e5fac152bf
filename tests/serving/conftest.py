"""The demo model, plans of it for two cores, and the deployment that engine tests share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minicluster.plan import (
    Deployable,
    Deployment,
    EngineSettings,
    Headroom,
    Inputs,
    Latency,
    Placement,
    Plan,
    Pool,
    Prediction,
    Provenance,
    Routing,
    StepModel,
    Validation,
)
from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.engine import EngineProfile, SchedulingRules
from minicluster.specs.gpu import GpuSpec
from minicluster.specs.model import ModelSpec, architecture_hash
from minicluster.specs.scenario import ClusterChoice, ModelChoice, ScenarioSpec
from minicluster.specs.slo import SloSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from minicluster.specs.workload import Lengths, WorkloadSpec
from serving.deployment.target import Target
from serving.measurement.demo_model import DemoShape, make_demo_model
from serving.protocol.endpoint_config import EndpointConfig, endpoint_config

from .deployed import Shared, Split, driven, up
from .faults.reference import FEW_LENGTHS, Reference, ask_bare_server
from .forks import Forks

PoolMaker = Callable[..., Pool]
DeploymentMaker = Callable[..., Deployment]
PlanMaker = Callable[[Deployment], Plan]
SMALL = DemoShape(num_layers=1, hidden_size=64, ffn_size=64)

DEADLINE_S = 15.0
"""
Of prefill and of the KV hand-off on the shared deployment: what is made to miss them is waited
for, and the longest prompt takes 2 s on a core of its own.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what shares a deployment together, before what deploys something else."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Return 0 for what needs no engine, 1 for what uses the shared deployment, 2 for the rest."""
    if item.get_closest_marker("engine") is None:
        return 0
    return 1 if SHARED in getattr(item, "fixturenames", ()) else 2


SHARED = "split"
"""Fixture of the tests that use the shared deployment."""


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Return what runs code beside Ray Serve and vLLM, imported once for all tests."""
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model as it ships."""
    return make_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the smallest model of the demo's kind, for tests that run no engine."""
    return make_demo_model(tmp_path_factory.mktemp("models") / "small", SMALL)


@pytest.fixture(scope="session")
def target() -> Target:
    """Return a machine of two cores with everything installed."""
    return Target(
        kind="cpu",
        system="Linux x86_64",
        cores=frozenset({0, 1}),
        num_gpus=0,
        memory_bytes=16 << 30,
        ray="2.60.0",
        vllm="0.29.0",
    )


@pytest.fixture(scope="session")
def make_pool() -> PoolMaker:
    """Make pools of one TP 1 replica on core 0 of a node, unless told otherwise."""

    def make(role: str, cores: tuple[int, ...] = (0,), **changes: object) -> Pool:
        given: dict[str, object] = {
            "role": role,
            "replicas": 1,
            "tp": 1,
            "pp": 1,
            "ep": 1,
            "gpu": "cpu",
            "dtype": "bf16",
            "max_num_seqs": 4 if role == "prefill" else 16,
            "max_num_batched_tokens": 2048,
            "kv_bytes": 268435456.0,
            "placement": (Placement(node="laptop", gpus=cores),),
        }
        return Pool(**{**given, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def make_deployment(make_pool: PoolMaker) -> DeploymentMaker:
    """Make deployments of a model: prefill on core 0, decode on core 1, unless told otherwise."""

    def make(
        model: Path,
        *,
        dtype: str = "bf16",
        prefill: Pool | None = None,
        decode: Pool | None = None,
        max_model_len: int = 2048,
    ) -> Deployment:
        config = json.loads((model / "config.json").read_text())
        fingerprint = architecture_hash(config)
        return Deployment(
            model=ModelSpec(
                id="demo",
                source=str(model),
                config_hash=fingerprint,
                num_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                ffn_size=config["intermediate_size"],
                vocab_size=config["vocab_size"],
                max_context_tokens=config["max_position_embeddings"],
                weight_dtype=dtype,
                kv_dtype=dtype,
            ),
            engine=EngineSettings(
                name="vllm",
                version="0.29.0",
                max_model_len=max_model_len,
                block_size=32,
                kv_dtype=dtype,
                gpu_memory_utilization=0.9,
            ),
            pools=(
                prefill or make_pool("prefill", (0,), dtype=dtype),
                decode or make_pool("decode", (1,), dtype=dtype),
            ),
            routing=Routing(),
        )

    return make


@pytest.fixture(scope="session")
def make_plan() -> PlanMaker:
    """Make the plan around a deployment; its predictions are of no interest here."""
    step = StepCoefficients(
        base_s=0.01,
        stream_s=0.0,
        per_prefill_token_s=1e-4,
        per_sequence_s=0.0,
        per_pair_s=0.0,
        per_context_token_s=0.0,
        max_tokens=1000,
        max_batch=8,
        max_context_tokens=1000,
        error_fraction=0.1,
    )
    latency = Latency(mean_s=0.1, p50_s=0.1, p90_s=0.1, p95_s=0.1, p99_s=0.1)
    load = WorkloadSpec(
        requests_per_s=1.0, input_tokens=Lengths.fixed(100), output_tokens=Lengths.fixed(10)
    )
    profile = EngineProfile(
        name="vllm",
        version="0.29.0",
        connector="nixl",
        pp=(1,),
        block_size=16,
        gpu_memory_utilization=0.9,
        activation_bytes=1.0,
        runtime_bytes=1.0,
        max_num_seqs=8,
        max_num_batched_tokens=1000,
        per_layer_s=0.0,
        per_step_s=0.0,
        per_sequence_s=0.0,
        per_request_s=0.0,
        transfer_base_s=0.0,
        scheduling=SchedulingRules(
            mixed_steps=True,
            chunked_prefill=True,
            kv_reserved_fraction=0.0,
            fp8_kv="requantised",
            async_scheduling_since=(0,),
        ),
    )

    def make(deployment: Deployment) -> Plan:
        return Plan(
            engine=deployment.engine,
            step_model=StepModel(
                prefill=step,
                decode=step,
                path=PathCoefficients(
                    request_s=0.0,
                    transfer_base_s=0.0,
                    transfer_per_token_s=0.0,
                    error_fraction=0.1,
                ),
                interference=Interference(),
            ),
            inputs=Inputs(
                scenario=ScenarioSpec(
                    model=ModelChoice(id="demo"),
                    cluster=ClusterChoice(gpu="cpu"),
                    workload=load,
                    # Loose: what is tested is not how fast this machine is.
                    slo=SloSpec(ttft_s=30.0, tpot_s=2.0),
                ),
                model=deployment.model,
                gpu=GpuSpec(name="cpu", vendor="any", kind="cpu"),
                cluster=ClusterSpec(
                    name="laptop", gpu="cpu", gpus_per_node=2, gpus_per_hb_domain=2, max_gpus=2
                ),
                engine=profile,
                calibration=None,
            ),
            pools=deployment.pools,
            routing=deployment.routing,
            prediction=Prediction(
                ttft=latency,
                tpot=latency,
                itl=latency,
                e2e=latency,
                output_tokens_per_s=10.0,
                capacity_requests_per_s=2.0,
                utilisation_fraction={"prefill": 0.5, "decode": 0.5},
                bottleneck={"prefill": "compute", "decode": "queue"},
                ttft_parts_s={"prefill": 0.1},
            ),
            headroom=Headroom(load_factor=1.5, binds="prefill queue"),
            validated_on=Validation(num_rows=0, note="no measurement like this"),
            deployable=Deployable(profile="vllm-0.29-nixl"),
            provenance=Provenance(version="0", inputs_hash="0" * 16),
        )

    return make


@pytest.fixture(scope="session")
def exact_plan(demo_model: Path, make_deployment: DeploymentMaker, make_plan: PlanMaker) -> Plan:
    """Return a plan of the demo in float32, where an answer does not depend on its neighbours."""
    return make_plan(make_deployment(demo_model, dtype="fp32"))


@pytest.fixture(scope="session")
def config(
    make_deployment: DeploymentMaker, make_plan: PlanMaker, small_model: Path
) -> EndpointConfig:
    """Return a plan of one replica each: 10 ms a step and 0.1 ms a prompt token."""
    deployment = make_deployment(small_model)
    plan = make_plan(deployment).under(slo=SloSpec(ttft_s=0.5, tpot_s=0.05))
    return endpoint_config(deployment, domains={"laptop": "d0"}, plan=plan, plan_hash="cafe")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Reference:
    """Return what vLLM's own server answers in float32, one request at a time."""
    log = tmp_path_factory.mktemp("reference") / "server.txt"
    return ask_bare_server(demo_model, FEW_LENGTHS, log)


@pytest.fixture(scope="session")
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """Return the shared deployment: one prefill and one decode replica in float32, with a plan."""

    @contextmanager
    def start() -> Iterator[Split]:
        names = {name for item in request.session.items for name in item.fixturenames}  # type: ignore[attr-defined]
        if "reference" in names:  # first, so that the two do not share cores
            request.getfixturevalue("reference")
        place = tmp_path_factory.mktemp("shared")
        deadlines = ("--prefill-deadline", str(DEADLINE_S), "--kv-deadline", str(DEADLINE_S))
        spoiled = (sys.executable, str(Path(__file__).parent / "faults/spoiled.py"))
        plan: Plan = request.getfixturevalue("exact_plan")
        replicas = {pool.role: pool.replicas for pool in plan.pools}
        with (
            up(place, plan, *deadlines, serving=spoiled) as base_url,
            driven(place, base_url, replicas=replicas, deadline_s=DEADLINE_S) as found,
        ):
            yield found

    deployment = Shared(start)
    yield deployment
    deployment.end()


@pytest.fixture(scope="module")
def split(shared: Shared) -> Split:
    """Have the shared deployment up."""
    return shared.get()


@pytest.fixture(scope="module")
def base_url(split: Split) -> str:
    """Return where the shared deployment answers."""
    return split.base_url


@pytest.fixture(scope="module")
def place(split: Split) -> Path:
    """Return the directory from which the shared deployment was made."""
    return split.place
