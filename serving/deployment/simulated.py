"""A plan with simulated engines: slowed down as asked for, and what each replica is told."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minicluster.engine_model.planned_limits import planned_limits, planned_lora
from minicluster.engine_model.true_steps import TrueSteps
from minicluster.errors import InputError
from minicluster.plan import NODE_LABEL, ROLE_LABEL
from minicluster.specs.step import StepCoefficients, StepTable
from minicluster.workload.arrivals import equally_likely
from serving.deployment.engine_args import LEASE_S, SIMULATED, planned_facts
from serving.deployment.feasibility import offload_findings
from serving.protocol.app_spec import SimulatedSettings
from serving.protocol.messages import SimulatedEngines
from serving.simulated.answering import BYTES_PER_TOKEN, TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Deployment, Plan, Pool
    from serving.deployment.engine_args import DeployTarget

Timed = TypeVar("Timed")

ENDPOINT_BYTES = 1.3e9
"""Resident memory of Ray and the endpoint (measured on 2026-11-23)."""

REPLICA_BYTES = 0.2e9
"""Resident memory of one replica with a simulated engine (measured on 2026-11-23)."""

UNASKED_TOKENS = 16
"""Length of such an answer where there is no plan: OpenAI's default."""

SEVERAL_LENGTHS = 100
"""Quantiles of the planned answers whose mean is the length of an answer that names none."""


def slowed(plan: Plan, slowdown: float) -> Plan:
    """Return the plan with every time *slowdown* times as long, and every rate as much lower."""
    inputs, scenario = plan.inputs, plan.inputs.scenario
    scenario = replace(
        scenario, slo=_slow(scenario.slo, slowdown), workload=_slow(scenario.workload, slowdown)
    )
    return replace(
        plan,
        inputs=replace(inputs, scenario=scenario, calibration=None),
        step_model=_slow(plan.step_model, slowdown),
        prediction=_slow(plan.prediction, slowdown),
    )


def _slow(timed: Timed, slowdown: float) -> Timed:
    if not is_dataclass(timed) or isinstance(timed, type):
        return timed
    changed: dict[str, Any] = {}
    for field in fields(timed):
        value = getattr(timed, field.name)
        factor = slowdown if field.name.endswith("_s") else 1.0
        factor = 1 / slowdown if field.name.endswith("_per_s") else factor
        if isinstance(value, dict):
            changed[field.name] = {
                name: _slow(field_value, slowdown) if factor == 1.0 else field_value * factor
                for name, field_value in value.items()
            }
        elif isinstance(value, tuple):
            changed[field.name] = tuple(_slow(field_value, slowdown) for field_value in value)
        elif isinstance(value, StepTable | StepCoefficients):
            changed[field.name] = value.scaled(slowdown)
        elif isinstance(value, float) and factor != 1.0:
            changed[field.name] = value * factor
        else:
            changed[field.name] = _slow(value, slowdown)
    return replace(timed, **changed)


def simulated_settings(
    deployment: Deployment,
    plan: Plan | None,
    pool: Pool,
    nodes: tuple[str, ...],
    target: DeployTarget,
) -> SimulatedSettings:
    """
    Return the settings of the replicas of a pool in one domain, on these planned *nodes*.

    Raises:
        InputError: the KV cache has no room for a block, or nothing says what steps take.
    """
    steps, model = target.truth, deployment.model
    if steps is None:
        if plan is None:
            raise InputError("--engine", SIMULATED, "a plan with step times, or --step-times")
        steps = TrueSteps(steps=plan.step_model)
    return SimulatedSettings(
        role=pool.role,
        slowdown=target.slowdown,
        limits=planned_limits(deployment, pool),
        lanes=pool.pp,
        ranks=pool.dp,
        lora=planned_lora(deployment, pool),
        steps=steps,
        keeps_steps=target.truth is not None,
        lease_s=LEASE_S[target.transport],
        model=model.id,
        adapters=tuple(target.lora_modules),
        source=model.source,
        vocab_size=model.vocab_size,
        max_model_len=deployment.engine.max_model_len,
        unasked_tokens=UNASKED_TOKENS if plan is None else _mean_answer(plan),
        facts=planned_facts(deployment, pool),
        places=tuple({ROLE_LABEL: pool.role, NODE_LABEL: node} for node in nodes),
    )


def _mean_answer(plan: Plan) -> int:
    answers = equally_likely(plan.workload, SEVERAL_LENGTHS).output_tokens
    return max(1, round(float(answers.mean())))


def simulated_engines(deployment: Deployment, target: DeployTarget) -> SimulatedEngines:
    """Return what the endpoint says of the engines: text is counted by the model's tokenizer."""
    has_tokenizer = (Path(deployment.model.source) / TOKENIZER).is_file()
    return SimulatedEngines(
        slowdown=target.slowdown,
        text_tokens=TOKENIZER if has_tokenizer else f"bytes/{BYTES_PER_TOKEN}",
    )


def simulated_findings(deployment: Deployment, memory_bytes: float) -> Iterator[str]:
    """Yield the reasons why this machine cannot hold the simulated replicas of a deployment."""
    yield from offload_findings(deployment, SIMULATED)
    # One process has all ranks of a group.
    replicas = sum(pool.replicas for pool in deployment.pools)
    fit = max(0, int((memory_bytes - ENDPOINT_BYTES) / REPLICA_BYTES))
    if replicas > fit:
        yield (
            f"memory: {replicas} simulated replicas need about"
            f" {(ENDPOINT_BYTES + replicas * REPLICA_BYTES) / 1e9:.1f} GB, and"
            f" {memory_bytes / 1e9:.1f} GB are free: room for {fit} (plan for a smaller load)"
        )
