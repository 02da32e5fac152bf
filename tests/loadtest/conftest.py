"""A plan for the fake server, and the fake server itself."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from loadtest.run.client_health import Client
from loadtest.run.folder import PLAN, Run
from loadtest.run.job import Job
from loadtest.run.schedule import Window
from minicluster.plan import (
    Deployable,
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
from minicluster.specs.model import ModelSpec
from minicluster.specs.scenario import ClusterChoice, ModelChoice, ScenarioSpec
from minicluster.specs.slo import SloSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.samples import Sample
from minicluster.workload.schedule import ScheduledRequest

PlanMaker = Callable[..., Plan]
SampleMaker = Callable[..., Sample]
RunMaker = Callable[..., Run]
ServerStarter = Callable[..., str]

FIRST_PORT, LAST_PORT, PORTS_A_PROCESS = 20_000, 30_000, 50
TAKEN: set[int] = set()

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05)
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
ENGINE = EngineProfile(
    name="vllm",
    version="0",
    connector="none",
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


def constant(seconds: float) -> Latency:
    """Return a latency that never varies."""
    return Latency(
        mean_s=seconds,
        p50_s=seconds,
        p90_s=seconds,
        p95_s=seconds,
        p99_s=seconds,
    )


def pool(role: str, core: int) -> Pool:
    """Return one replica on one core."""
    return Pool(
        role=role,
        replicas=1,
        tp=1,
        pp=1,
        ep=1,
        gpu="cpu",
        dtype="bf16",
        max_num_seqs=8,
        max_num_batched_tokens=1000,
        kv_bytes=1e6,
        placement=(Placement(node="here", gpus=(core,)),),
    )


@pytest.fixture
def make_plan() -> PlanMaker:
    """Make plans for the fake server's default timings: TTFT 50 ms, TPOT 20 ms."""

    def make(
        rate: float = 40.0,
        *,
        ttft_s: float = 0.05,
        tpot_s: float = 0.02,
        num_output: int = 10,
        slo: SloSpec = SLO,
    ) -> Plan:
        load = WorkloadSpec(
            requests_per_s=rate,
            input_tokens=Lengths(distribution="uniform", low=16, high=64),
            output_tokens=Lengths.fixed(num_output),
        )
        return Plan(
            engine=EngineSettings(
                name="vllm",
                version="0",
                max_model_len=1000,
                block_size=32,
                kv_dtype="bf16",
                gpu_memory_utilization=0.9,
            ),
            step_model=StepModel(
                prefill=STEP,
                decode=STEP,
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
                    model=ModelChoice(id="fake"),
                    cluster=ClusterChoice(gpu="cpu"),
                    workload=load,
                    slo=slo,
                ),
                model=MODEL,
                gpu=GpuSpec(name="cpu", vendor="none", kind="cpu"),
                cluster=ClusterSpec(
                    name="here", gpu="cpu", gpus_per_node=2, gpus_per_hb_domain=2, max_gpus=2
                ),
                engine=ENGINE,
                calibration=None,
            ),
            pools=(pool("prefill", 0), pool("decode", 1)),
            routing=Routing(),
            prediction=Prediction(
                ttft=constant(ttft_s),
                tpot=constant(tpot_s),
                itl=constant(tpot_s),
                e2e=constant(ttft_s + (num_output - 1) * tpot_s),
                output_tokens_per_s=rate * num_output,
                capacity_requests_per_s=2 * rate,
                utilisation_fraction={"prefill": 0.5, "decode": 0.6},
                bottleneck={"prefill": "compute", "decode": "memory bandwidth"},
                ttft_parts_s={"prefill": ttft_s},
            ),
            headroom=Headroom(load_factor=1.5, binds="prefill queue"),
            validated_on=Validation(num_rows=0, note="no measurement like this"),
            deployable=Deployable(profile="fake"),
            provenance=Provenance(version="0", inputs_hash="0" * 16),
        )

    return make


@pytest.fixture
def start_server() -> Iterator[ServerStarter]:
    """Start fake servers with given behaviour; all end with the test."""
    started = []

    def start(**behaviour: float | str) -> str:
        options = [
            part
            for name, value in behaviour.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        server = subprocess.Popen(
            [sys.executable, "-m", "loadtest.selftest.mock_server", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(server)
        assert server.stdout
        return server.stdout.readline().strip()

    yield start
    for server in started:
        server.kill()
        server.communicate()


@pytest.fixture
def free_port() -> int:
    """
    Return a port for a program that has to be told one.

    It lies below those that the kernel gives away by itself, and is another one in each process
    of the tests and each time: nothing takes it between this and that program's start.
    """
    first = FIRST_PORT + os.getpid() * PORTS_A_PROCESS % (LAST_PORT - FIRST_PORT)
    for port in itertools.chain(range(first, LAST_PORT), range(FIRST_PORT, first)):
        if port in TAKEN:
            continue
        TAKEN.add(port)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port left")


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """Return a port on which nothing listens, and nothing can as long as the test runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        yield port


@pytest.fixture
def make_sample() -> SampleMaker:
    """Make samples of requests due, sent and answered as told."""

    def make(  # noqa: PLR0913  (each test names what it is about)
        index: int = 0,
        due_s: float = 0.0,
        *,
        lag_s: float = 0.0,
        ttft_s: float | None = 0.05,
        itl_s: float = 0.02,
        num_output: int = 10,
        outcome: str = "ok",
        end_s: float | None = None,
        **changes: object,
    ) -> Sample:
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

    return make


@pytest.fixture
def make_run(make_plan: PlanMaker) -> RunMaker:
    """Make runs of the plan for the fake server from given samples."""

    def make(samples: Sequence[Sample], **client: object) -> Run:
        plan = make_plan()
        window = Window(start_s=0.0, end_s=10.0, drain_s=30.0)
        healthy = Client(
            stop="complete",
            started_unix_s=0.0,
            origin_monotonic_s=0.0,
            wall_s=11.0,
            cpu_fraction=0.1,
            heartbeat_lag_s=(0.001,) * 100,
            machine="this one",
            versions={"minicluster": "0", "python": "3", "locust": "2"},
        )
        return Run(
            job=Job(
                host="http://127.0.0.1:1",
                model="fake",
                vocab_size=500,
                seed=0,
                prompt_salt=0,
                workload=plan.workload,
                slo=plan.slo,
                window=window,
                timeout_s=30.0,
                plan=PLAN,
            ),
            plan=plan,
            schedule=tuple(
                ScheduledRequest(
                    index=s.index,
                    due_s=s.due_s,
                    input_tokens=32,
                    output_tokens=10,
                    in_window=s.in_window,
                )
                for s in samples
            ),
            samples=tuple(samples),
            client=replace(healthy, **client),
        )

    return make
