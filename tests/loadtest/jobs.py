"""A job of the tests, to an address where nothing listens, and a client that was fit for it."""

from __future__ import annotations

from loadtest.run.client_health import Client
from loadtest.run.job import Job
from loadtest.run.schedule import Window
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec

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
