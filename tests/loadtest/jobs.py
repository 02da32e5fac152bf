"""A job of the tests: nobody listens where it goes."""

from __future__ import annotations

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
