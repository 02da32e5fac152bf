"""`sizing calibrate --engine`: when it measures, and the burst that it sends."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from minicluster.machine import this_machine
from minicluster.plan import StepModel
from minicluster.specs.step import Interference
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.traces import read_trace
from sizing.cli import calibrate
from sizing.cli.calibrate import burst_rate, write_burst
from sizing.latency.calibration import read_calibration
from sizing.scenario import Scenario
from tests.plans import PATH, STEP
from tests.sizing.conftest import Sizing

LOAD = WorkloadSpec(
    requests_per_s=4.0, input_tokens=Lengths.fixed(100), output_tokens=Lengths.fixed(10)
)


@pytest.mark.parametrize(("step_s", "rate"), [(0.02, 0.45 / 0.035), (0.2, 4 / (10 * 0.25))])
def test_prefill_or_decode_bounds_the_burst(step_s: float, rate: float) -> None:
    """45 % of prefill, 35 ms a prompt in service, or four sequences of slower steps."""
    between = Interference(prefill_fraction=0.5, prefill_per_request_s=0.005, decode_fraction=0.25)
    decode = replace(STEP, base_s=step_s)
    model = StepModel(prefill=STEP, decode=decode, path=PATH, interference=between)
    assert burst_rate(model, LOAD) == pytest.approx(rate)


def test_constants_of_this_machine_are_not_measured_again(
    sizing: Sizing, laptop: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless --again asks for it; those of another machine are measured in any case."""
    scenario, _, model, _, made_up = laptop
    given = Scenario.load(Path(scenario), [model], None)
    spec, made = given.model, read_calibration(Path(made_up))
    here = this_machine(
        given.engine.name, model_config_hash=spec.config_hash, dtype=spec.weight_dtype
    )
    monkeypatch.setattr(calibrate, "timed_engine", lambda *_, **__: made)
    out = tmp_path / "calibration.json"
    for key, options, measured in (
        (here, (), False),
        (here, ("--again",), True),
        (made.key, (), True),
    ):
        out.write_text(json.dumps(asdict(replace(made, key=key))))
        done = sizing("calibrate", *laptop[:3], "--engine", *options, "-o", str(out))
        assert done.code == 0
        assert ("measure again with --again" in done.err) is not measured
        assert read_calibration(out).key == (made.key if measured else here)


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
