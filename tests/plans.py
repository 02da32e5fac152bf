"""The plan around a deployment, for tests of every command."""

from __future__ import annotations

from dataclasses import replace

from minicluster.plan import (
    Deployable,
    Deployment,
    Headroom,
    Inputs,
    Latency,
    Plan,
    Prediction,
    Provenance,
    StepModel,
    Validation,
)
from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.engine import EngineProfile
from minicluster.specs.gpu import GpuSpec
from minicluster.specs.lora import LoraSpec
from minicluster.specs.scenario import ClusterChoice, ModelChoice, ScenarioSpec
from minicluster.specs.slo import SloSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients, StepTable
from minicluster.specs.workload import WorkloadSpec

STEP = StepCoefficients(
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
TABLE = StepTable(
    tokens=(0.0, 100.0, 400.0),
    sequences=(0.0, 8.0),
    fixed_s=((0.001, 0.002, 0.005), (0.003, 0.004, 0.008)),
    per_key_s=(1e-6, 1e-6, 2e-6),
    per_context_token_s=(1e-7, 2e-7),
)
PATH = PathCoefficients(
    request_s=0.0, transfer_base_s=0.0, transfer_per_token_s=0.0, error_fraction=0.1
)


def constant(seconds: float) -> Latency:
    """Return a latency that never varies."""
    return Latency(mean_s=seconds, p50_s=seconds, p90_s=seconds, p95_s=seconds, p99_s=seconds)


def prediction_of(ttft_s: float, tpot_s: float, *, rate: float, num_output: int) -> Prediction:
    """Return a prediction of constant latencies at twice the capacity that *rate* needs."""
    return Prediction(
        ttft=constant(ttft_s),
        tpot=constant(tpot_s),
        itl=constant(tpot_s),
        e2e=constant(ttft_s + (num_output - 1) * tpot_s),
        output_tokens_per_s=rate * num_output,
        capacity_requests_per_s=2 * rate,
        utilisation_fraction={"prefill": 0.5, "decode": 0.6},
        bottleneck={"prefill": "compute", "decode": "memory bandwidth"},
        ttft_parts_s={"prefill": ttft_s},
    )


def plan_of(
    deployment: Deployment,
    *,
    profile: EngineProfile,
    workload: WorkloadSpec,
    slo: SloSpec,
    prediction: Prediction,
) -> Plan:
    """Return a plan for two cores: 10 ms a step and 0.1 ms a prompt token."""
    node = deployment.pools[0].placement[0].node
    return Plan(
        engine=deployment.engine,
        step_model=StepModel(prefill=STEP, decode=STEP, path=PATH, interference=Interference()),
        inputs=Inputs(
            scenario=ScenarioSpec(
                model=ModelChoice(id=deployment.model.id),
                cluster=ClusterChoice(gpu="cpu"),
                workload=workload,
                slo=slo,
            ),
            model=deployment.model,
            gpu=GpuSpec(name="cpu", vendor="none", kind="cpu"),
            cluster=ClusterSpec(
                name=node, gpu="cpu", gpus_per_node=2, gpus_per_hb_domain=2, max_gpus=2
            ),
            engine=profile,
            calibration=None,
        ),
        pools=deployment.pools,
        routing=deployment.routing,
        prediction=prediction,
        headroom=Headroom(load_factor=1.5, binds="prefill queue"),
        validated_on=Validation(num_rows=0, note="no measurement like this"),
        deployable=Deployable(profile="vllm-0.29-nixl"),
        provenance=Provenance(version="0", inputs_hash="0" * 16),
    )


def with_lora(plan: Plan, lora: LoraSpec) -> Plan:
    """Return the plan with slots for adapters."""
    inputs = replace(plan.inputs, engine=replace(plan.inputs.engine, lora=lora))
    return replace(plan, engine=replace(plan.engine, lora=lora), inputs=inputs)
