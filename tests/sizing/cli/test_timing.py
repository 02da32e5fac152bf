"""The burst of `sizing calibrate --engine`: its rate, and what is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from minicluster.plan import StepModel
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.traces import read_trace
from sizing.cli.calibrate import burst_rate, write_burst

LOAD = WorkloadSpec(
    requests_per_s=4.0, input_tokens=Lengths.fixed(100), output_tokens=Lengths.fixed(10)
)


def steps(base_s: float, per_token_s: float = 0.0) -> StepCoefficients:
    """Return a step that takes a base and so much a prompt token."""
    return StepCoefficients(
        base_s=base_s,
        stream_s=0.0,
        per_prefill_token_s=per_token_s,
        per_sequence_s=0.0,
        per_pair_s=0.0,
        per_context_token_s=0.0,
        max_tokens=512,
        max_batch=16,
        max_context_tokens=1024,
        error_fraction=0.0,
    )


def model(step_s: float) -> StepModel:
    """Return a prefill of 50 ms for 100 tokens, half as long again in service, 5 ms a request."""
    return StepModel(
        prefill=steps(0.01, 0.0004),
        decode=steps(step_s),
        path=PathCoefficients(
            request_s=0.0, transfer_base_s=0.0, transfer_per_token_s=0.0, error_fraction=0.0
        ),
        interference=Interference(prefill_fraction=0.5, prefill_per_request_s=0.005),
    )


def test_the_burst_fills_45_percent_of_prefill() -> None:
    """A prompt in service takes 80 ms: 0.45 / 0.08 s."""
    assert burst_rate(model(0.02), LOAD) == pytest.approx(0.45 / 0.08)


def test_slow_decoding_bounds_the_burst() -> None:
    """Four sequences of ten steps of 0.2 s each are two requests a second."""
    assert burst_rate(model(0.2), LOAD) == pytest.approx(4 / (10 * 0.2))


@pytest.mark.parametrize(("rate", "length_s"), [(10.0, 32.0), (2.0, 35.0)])
def test_the_schedule_is_a_trace_of_the_rate(tmp_path: Path, rate: float, length_s: float) -> None:
    """270 requests behind 5 s of warm-up, at most 35 s, of the scenario's lengths."""
    file = tmp_path / "burst.schedule.jsonl"
    write_burst(file, LOAD, rate)
    arrivals = read_trace(file).arrivals

    assert len(arrivals) == round(length_s * rate)
    assert arrivals.due_s[-1] == pytest.approx(length_s, rel=0.25)
    assert set(arrivals.input_tokens) == {100}
    assert set(arrivals.output_tokens) == {10}
