"""`sizing calibrate --engine`: when it measures, and the burst that it sends."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minicluster.errors import TargetFailed
from minicluster.machine import this_machine
from minicluster.phases import INGRESS
from minicluster.plan import StepModel
from minicluster.specs.step import Interference
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.traces import read_trace
from sizing.cli import calibrate
from sizing.cli.calibrate import burst_rate, write_burst
from sizing.evidence.refit.fit import Scales
from sizing.evidence.refit.hiccups import Hiccup
from sizing.latency.calibration import read_calibration
from sizing.planner.deployment import measurement_deployment
from sizing.scenario import Scenario
from tests.plans import PATH, STEP
from tests.sizing.conftest import Sizing

LOAD = WorkloadSpec(
    requests_per_s=4.0, input_tokens=Lengths.fixed(100), output_tokens=Lengths.fixed(10)
)


@pytest.mark.parametrize(
    ("step_s", "planned", "rate"),
    [(0.02, 50.0, 0.45 / 0.035), (0.2, 50.0, 4 / (10 * 0.25)), (0.02, 3.0, 3.0)],
)
def test_the_burst_has_the_planned_rate_or_what_pools_carry(
    step_s: float, planned: float, rate: float
) -> None:
    """45 % of prefill, 35 ms a prompt in service, or four sequences of slower steps."""
    between = Interference(prefill_fraction=0.5, prefill_per_request_s=0.005, decode_fraction=0.25)
    decode = replace(STEP, base_s=step_s)
    model = StepModel(prefill=STEP, decode=decode, path=PATH, interference=between)
    assert burst_rate(model, LOAD.at_rate(planned)) == pytest.approx(rate)


def test_constants_of_this_machine_are_not_measured_again(
    sizing: Sizing, laptop: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless --again asks for it; those of another machine, or simulated, are in any case."""
    scenario, _, model, _, made_up = laptop
    given = Scenario.load(Path(scenario), [model], None)
    spec, made = given.model, read_calibration(Path(made_up))
    here = this_machine(
        given.engine.name, model_config_hash=spec.config_hash, dtype=spec.weight_dtype
    )
    knees = {"stream_s": 0.0315, "knee_tokens": (512,), "knee_per_token_s": (2e-5,)}
    made = replace(made, prefill=replace(made.prefill, **knees))
    monkeypatch.setattr(calibrate, "timed_engine", lambda *_, **__: made)
    out = tmp_path / "calibration.json"
    for key, options, measured in (
        (here, (), False),
        (here, ("--again",), True),
        (here, ("--step-times", "truth.json"), True),
        (made.key, (), True),
    ):
        out.write_text(json.dumps(asdict(replace(made, key=key))))
        done = sizing("calibrate", *laptop[:3], "--engine", *options, "-o", str(out))
        assert done.code == 0
        assert ("measure again with --again" in done.err) is not measured
        assert read_calibration(out).key == (made.key if measured else here)
        # 8.0 ms + the larger of 31.5 ms and 450 µs/token + 20 µs/token beyond 512, in lines
        assert ({"8.0", "31.5", "450", "20", "512"} <= set(done.err.split())) is measured


@pytest.mark.parametrize("rate", [10.0, 2.0])
def test_the_schedule_is_a_trace_of_the_rate(tmp_path: Path, rate: float) -> None:
    """27 s behind 4 s of warm-up, of the scenario's lengths; another seed is another trace."""
    length_s = 31.0
    file = tmp_path / "burst.schedule.jsonl"
    write_burst(file, LOAD, rate)
    arrivals = read_trace(file).arrivals

    assert len(arrivals) == round(length_s * rate)
    assert arrivals.due_s[-1] == pytest.approx(length_s, rel=0.25)
    assert set(arrivals.input_tokens) == {100}
    assert set(arrivals.output_tokens) == {10}
    write_burst(again := tmp_path / "again.jsonl", LOAD, rate, seed=1)
    assert again.read_text() != file.read_text()


@pytest.mark.parametrize("left", [[150], [20, 150], [20, 30]])
def test_a_disturbed_burst_is_repeated_once(
    left: list[int],
    laptop: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hiccups are cut out and named; two loads without enough left fit nothing."""
    scenario, _, model, _, made_up = laptop
    inputs = Scenario.load(Path(scenario), [model], None)
    made = read_calibration(Path(made_up))
    hiccup = Hiccup(begin_s=4.0, end_s=6.5, cause="the load client stood still for 0.5 s")
    seeds: list[int] = []

    def observed(*_args: object) -> Any:  # noqa: ANN401
        counts = np.ones(left[len(seeds) - 1], dtype=bool)
        unknown = {INGRESS: np.full(len(counts), np.nan)}
        return SimpleNamespace(counts=counts, steps={}, hiccups=(hiccup,), phases_s=unknown)

    monkeypatch.setattr(calibrate, "burst_rate", lambda *_: 7.0)
    monkeypatch.setattr(calibrate, "_send_burst", lambda *_, seed: seeds.append(seed))
    monkeypatch.setattr(calibrate, "observed", observed)
    monkeypatch.setattr(calibrate, "fit_scales", lambda *_: Scales(request=2.0))
    deployment = measurement_deployment(inputs)
    if left[-1] < 100:
        with pytest.raises(TargetFailed, match="2 short loads in a row were disturbed"):
            calibrate._with_burst(inputs, deployment, made, tmp_path / "burst")
    else:
        fitted = calibrate._with_burst(inputs, deployment, made, tmp_path / "burst")
        assert fitted.path.request_s == pytest.approx(2 * made.path.request_s)
    assert seeds == list(range(len(left)))
    assert "cut out, 4.0 to 6.5 s: the load client stood still" in capsys.readouterr().err
