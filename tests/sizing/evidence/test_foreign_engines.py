"""A calibration predicts simulated engines of drawn step times, which it knows by timing alone."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from minicluster.contention import CpuTimes
from minicluster.engine_model.true_steps import TrueSteps, drawn
from minicluster.machine import this_machine
from minicluster.phases import HANDOFF, INGRESS, QUEUED_PREFILL
from minicluster.plan import Deployment, StepModel, step_time
from minicluster.specs.calibration import CalibrationSpec, Measurement
from minicluster.specs.scenario import (
    ClusterChoice,
    EngineChoice,
    ModelChoice,
    ScenarioSpec,
    SearchChoice,
)
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import Arrivals, equally_likely
from minicluster.workload.engine_steps import EngineSteps
from minicluster.workload.sources import RequestSource
from minicluster.workload.sources import drawn as drawn_arrivals
from serving.measurement.step_benchmark import Extent, GridPoints, time_grid
from sizing import catalog
from sizing.cli.calibrate import BURST_S, WARM_UP_S, burst_rate, refitted
from sizing.evidence.refit.engine_steps import timed_steps
from sizing.evidence.refit.observed import Observed
from sizing.latency.calibration import fit_calibration
from sizing.planner.deployment import measurement_deployment
from sizing.planner.layout import Layout
from sizing.planner.step_models import StepModels
from sizing.simulation.outcome import simulate_system
from sizing.simulation.planned import deployed_system
from tests.serving.virtual_time import run
from tests.sizing.evidence.foreign import Answer, ForeignEndpoint

LOADS = (0.3, 0.6, 0.85)
"""Shares of what the prefill pool carries."""

REQUESTS = 500
LIMIT = 0.05
STATISTICS = (0.5, 0.9, 0.99)

SCENARIO = ScenarioSpec(
    model=ModelChoice(id="llama-3.1-8b", max_context_tokens=2048),
    cluster=ClusterChoice(preset="h200-8", max_gpus=2),
    workload=WorkloadSpec(
        requests_per_s=6.0,
        input_tokens=Lengths(distribution="uniform", low=300, high=1500),
        output_tokens=Lengths(distribution="uniform", low=40, high=160),
    ),
    slo=SloSpec(ttft_s=1.0, tpot_s=0.05),
    search=SearchChoice(pools="split"),
)


@pytest.mark.parametrize(
    ("seed", "engine"),
    [
        (0, EngineChoice()),
        (1, EngineChoice(max_num_batched_tokens=512, max_num_seqs=16)),
        (2, EngineChoice(chunked_prefill_tokens=384)),
    ],
    ids=["default", "small steps", "chunks"],
)
def test_a_calibration_predicts_foreign_engines(seed: int, engine: EngineChoice) -> None:
    """Each statistic of TTFT, TPOT and E2E within 5 % at three loads, of random step times."""
    inputs = catalog.inputs_of(replace(SCENARIO, engine=engine), "test")
    planned = StepModels(inputs).of(Layout.split(1, 1, inputs.gpu.name))
    truth = drawn(planned, Random(seed))  # noqa: S311  (no secret)
    deployment = measurement_deployment(inputs)
    fitted = calibrated(deployment, truth)
    mean_s = step_time.prefill_s(fitted.prefill, equally_likely(SCENARIO.workload, 50)[0]).mean()

    for share in LOADS:
        arrivals = arriving(share / float(mean_s), REQUESTS, seed=7)
        measured = latencies(run(loaded(deployment, truth, arrivals))[0])
        simulated = simulate_system(
            deployed_system(deployment, StepModel.calibrated(fitted)), arrivals, seed=0, gaps=False
        )
        predicted = (simulated.ttft_s, simulated.tpot_s, simulated.e2e_s)
        for ours, theirs in zip(predicted, measured, strict=True):
            errors = np.divide(statistics(ours), statistics(theirs)) - 1
            assert np.abs(errors).max() < LIMIT, (share, errors)


def calibrated(deployment: Deployment, truth: TrueSteps) -> CalibrationSpec:
    """Time the grid, fit, send a burst, and refit, as `sizing calibrate --engine` does."""
    key = this_machine("vllm", model_config_hash=deployment.model.config_hash, dtype="bf16")
    rows = [
        Measurement(date="2026-11-29", key=key, **asdict(point))
        for point in run(timed(deployment, truth))
    ]
    fitted = fit_calibration(rows, name="foreign")
    model = StepModel.calibrated(fitted)
    rate = burst_rate(model, SCENARIO.workload)
    burst = arriving(rate, round((WARM_UP_S + BURST_S) * rate), seed=0)
    answers, steps = run(loaded(deployment, truth, burst))
    ttft_s, tpot_s, _ = latencies(answers)
    request_s = truth.steps.path.request_s
    queued_s = np.array([answer.prefilled_s - answer.sent_s for answer in answers]) - request_s
    phases = {
        INGRESS: np.full(len(burst), request_s),
        QUEUED_PREFILL: queued_s,
        HANDOFF: ttft_s - queued_s - request_s,
    }
    observed = Observed(
        name="burst",
        deployment=deployment,
        step_model=model,
        calibration=fitted,
        arrivals=burst,
        counts=burst.due_s >= WARM_UP_S,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        phases_s=phases,
        steps=timed_steps(steps),
    )
    return refitted(fitted, observed)


async def timed(deployment: Deployment, truth: TrueSteps) -> GridPoints:
    """Time the grid on an endpoint of these engines, on cores that nothing else takes."""

    def clock() -> CpuTimes:
        return CpuTimes(at_s=time.monotonic(), busy_s=0.0, ours_s=0.0, cores=1)

    endpoint = ForeignEndpoint(deployment, truth)
    return await time_grid(endpoint, Extent.of(deployment), lambda _: None, clock)


async def loaded(
    deployment: Deployment, truth: TrueSteps, arrivals: Arrivals
) -> tuple[list[Answer], EngineSteps]:
    """Send a load to such an endpoint; return the answers, and the steps of the engines."""
    endpoint = ForeignEndpoint(deployment, truth)
    answers = await endpoint.load(arrivals)
    return answers, EngineSteps(start_unix_s=0.0, of=endpoint.steps)


def arriving(rate: float, count: int, *, seed: int) -> Arrivals:
    """Draw the scenario's requests at a rate."""
    load = SCENARIO.workload.at_rate(rate)
    return drawn_arrivals(load, RequestSource(), count=count, seed=seed)


def latencies(answers: list[Answer]) -> tuple[NDArray[np.float64], ...]:
    """Return TTFT, TPOT and E2E of each answer."""
    ttft_s = np.array([answer.ttft_s for answer in answers])
    e2e_s = np.array([answer.stamps[-1][0] - answer.sent_s for answer in answers])
    return ttft_s, (e2e_s - ttft_s) / (np.array([answer.tokens for answer in answers]) - 1), e2e_s


def statistics(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return mean and percentiles."""
    return (float(values.mean()), *np.quantile(values, STATISTICS).tolist())
