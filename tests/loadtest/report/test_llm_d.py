"""The measurement as a benchmark report of llm-d, by llm-d's own schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from loadtest.report.llm_d import to_llm_d
from minicluster.workload.samples import Sample
from tests.loadtest.made import judge, make_run, make_sample

SCHEMA = Path(__file__).parents[2] / "published" / "llm_d_benchmark_report_0_2_1.json"


def report_of(samples: list[Sample]) -> tuple[dict[str, Any], Any]:
    run = judge(make_run(samples))
    return json.loads(to_llm_d(run)), run.verdict


@pytest.mark.parametrize("failed", [0, 3, 40])
def test_every_report_is_one_by_the_schema(failed: int) -> None:
    """Also of a run with failures, and of one without any answer."""
    samples = [make_sample(at, outcome="timeout" if at < failed else "ok") for at in range(40)]
    found, verdict = report_of(samples)
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(found)
    requests = found["results"]["request_performance"]["aggregate"]["requests"]
    assert (requests["total"], requests["failures"]) == (40, failed)
    assert found["run"]["description"].startswith(verdict.verdict.upper())


def test_latencies_are_those_of_the_verdict() -> None:
    found, verdict = report_of([make_sample(at) for at in range(40)])
    latency = found["results"]["request_performance"]["aggregate"]["latency"]
    for metric, name in (
        ("ttft", "time_to_first_token"), ("tpot", "time_per_output_token"),
        ("itl", "inter_token_latency"), ("e2e", "request_latency"),
    ):  # fmt: skip
        known = verdict.latency[metric]
        assert latency[name]["mean"] == known.mean_s
        assert latency[name]["p99"] == known.p99_s
    rate = found["results"]["request_performance"]["aggregate"]["throughput"]["request_rate"]
    assert rate["mean"] == verdict.throughput.answered_requests_per_s
