"""A plan for the mock server's default timings, and samples and runs without any server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.cli.studies import TOLERANCE
from loadtest.run.client_health import Client, write_client
from loadtest.run.folder import PLAN, Run
from loadtest.run.job import Job
from loadtest.run.schedule import Window
from loadtest.studies.capacity_search import CapacitySearch, Probe
from loadtest.verdict.verdict import Judged, Verdict, conclude
from minicluster.plan import Deployment, EngineSettings, Plan, Routing, to_json
from minicluster.specs.model import ModelSpec
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.samples import Sample, to_line
from minicluster.workload.schedule import ScheduledRequest
from tests.plans import plan_of, prediction_of
from tests.serving.plans import PROFILE, make_pool

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05)
MODEL = ModelSpec(
    id="fake",
    source="fake",
    config_hash="0" * 16,
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=8,
    vocab_size=500,
    max_context_tokens=1000,
)
BATCHES = {"max_num_seqs": 8, "max_num_batched_tokens": 1000}
JOB = Job(
    host="http://127.0.0.1:1",
    model="fake",
    vocab_size=500,
    seed=1,
    prompt_salt=2,
    workload=WorkloadSpec(
        requests_per_s=1.0,
        input_tokens=Lengths(distribution="uniform", low=20, high=900),
        output_tokens=Lengths.fixed(5),
        prefix_tokens=16,
    ),
    slo=SloSpec(),
    window=Window(start_s=5, end_s=10, drain_s=30),
    timeout_s=30.0,
    plan=None,
)
REQUEST = ScheduledRequest(index=0, due_s=0.0, input_tokens=32, output_tokens=10, in_window=True)
CLIENT = Client(
    stop="complete",
    started_unix_s=0.0,
    origin_monotonic_s=0.0,
    wall_s=10.0,
    cpu_fraction=0.2,
    heartbeat_lag_s=(0.001,) * 100,
    machine="this one",
    versions={},
    connections=3,
)


def make_plan(
    rate: float = 40.0,
    *,
    ttft_s: float = 0.05,
    tpot_s: float = 0.02,
    num_output: int = 10,
    slo: SloSpec = SLO,
) -> Plan:
    """Make a plan for the mock server's default timings: TTFT 50 ms, TPOT 20 ms."""
    load = WorkloadSpec(
        requests_per_s=rate,
        input_tokens=Lengths(distribution="uniform", low=16, high=64),
        output_tokens=Lengths.fixed(num_output),
    )
    settings = EngineSettings(
        name="vllm",
        version=PROFILE.version,
        max_model_len=1000,
        block_size=32,
        kv_dtype="bf16",
        gpu_memory_utilization=PROFILE.gpu_memory_utilization,
    )
    deployment = Deployment(
        model=MODEL,
        engine=settings,
        pools=(make_pool("prefill", (0,), **BATCHES), make_pool("decode", (1,), **BATCHES)),
        routing=Routing(),
    )
    predicted = prediction_of(ttft_s, tpot_s, rate=rate, num_output=num_output)
    return plan_of(deployment, profile=PROFILE, workload=load, slo=slo, prediction=predicted)


def plan_json(plan: Plan, folder: Path) -> Path:
    """Write *plan* into *folder* as a user has it."""
    path = folder / "given.json"
    path.write_text(to_json(plan))
    return path


def make_sample(  # noqa: PLR0913  (each test names what it is about)
    index: int = 0,
    due_s: float = 0.0,
    *,
    lag_s: float = 0.0,
    ttft_s: float | None = 0.05,
    itl_s: float = 0.02,
    num_output: int = 10,
    outcome: str = "ok",
    end_s: float | None = None,
    **changes: Any,  # noqa: ANN401
) -> Sample:
    """Make the sample of a request due, sent and answered as told."""
    send_s = due_s + lag_s
    times = [] if ttft_s is None else [send_s + ttft_s + k * itl_s for k in range(num_output)]
    last_s = times[-1] if times else send_s
    sample = Sample(
        index=index,
        in_window=True,
        due_s=due_s,
        send_s=send_s,
        end_s=last_s if end_s is None else end_s,
        asked_input_tokens=32,
        asked_output_tokens=num_output,
        input_tokens=32,
        output_tokens=num_output,
        chunk_s=tuple(times),
        chunk_tokens=(1,) * len(times),
        outcome=outcome,
    )
    return replace(sample, **changes)


def make_run(samples: Sequence[Sample], **client: Any) -> Run:  # noqa: ANN401
    """Make a run of the plan for the mock server, by a client that was fit unless told."""
    plan = make_plan()
    window = Window(start_s=0.0, end_s=10.0, drain_s=30.0)
    return Run(
        job=replace(
            JOB,
            seed=0,
            prompt_salt=0,
            workload=plan.workload,
            slo=plan.slo,
            window=window,
            plan=PLAN,
        ),
        plan=plan,
        schedule=tuple(
            replace(REQUEST, index=s.index, due_s=s.due_s, in_window=s.in_window) for s in samples
        ),
        samples=tuple(samples),
        client=replace(CLIENT, **{"wall_s": 11.0, "cpu_fraction": 0.1, **client}),
    )


def leave(folder: Path, samples: Sequence[Sample], client: Client = CLIENT) -> None:
    """Write into *folder* what a client leaves there."""
    (folder / "samples.jsonl").write_text("".join(f"{to_line(s)}\n" for s in samples))
    write_client(client, folder / "client.json")


def judge(run: Run, **how: Any) -> Judged:  # noqa: ANN401
    """Judge *run* as `loadtest report` does."""
    return conclude(run, TOLERANCE, **{"require_prediction": False, **how})


def judged(run: Run, **how: Any) -> Verdict:  # noqa: ANN401
    return judge(run, **how).verdict


def make_probe(rate: float, *, holds: bool | None) -> Probe:
    return Probe(
        requests_per_s=rate,
        num_requests=100,
        verdict={True: "met", False: "missed", None: "inconclusive"}[holds],
        holds=holds,
        attained_fraction=1.0 if holds else 0.5,
        good_requests_per_s=rate if holds else 0.7 * rate,
        ttft_s=0.1 if holds else None,
        tpot_s=0.01,
        folder="try",
    )


SEARCH = CapacitySearch(
    host="http://127.0.0.1:1",
    inputs_hash="0",
    percentile="p50",
    first_requests_per_s=8.0,
    resolution_fraction=0.1,
    most_requests=100,
    predicted_requests_per_s=10.0,
    saturation_requests_per_s=12.0,
)
