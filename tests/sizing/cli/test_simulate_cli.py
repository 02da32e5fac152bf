"""`sizing simulate`: streams, files, and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minicluster.phases import TTFT_PHASES
from minicluster.plan import read_plan
from minicluster.workload.engine_steps import EngineStep, write_engine_steps
from tests.sizing.conftest import QUICK, Sizing


@pytest.fixture(scope="module")
def plan(plan_of: Callable[..., Path]) -> str:
    """Return a plan."""
    return str(plan_of(*QUICK))


def test_json_is_the_same_every_time(sizing: Sizing, plan: str) -> None:
    """Equal arguments give equal bytes; the numbers are in order, and near the plan's."""
    one, same = (sizing(*("simulate", plan, "--requests", "3000", "--json")) for _ in range(2))
    assert one == same
    assert one.code == 0
    found = json.loads(one.out)
    assert found["requests"] == 3000
    assert found["requests"] >= found["counted_requests"] > 1500
    ttft = found["latencies"]["ttft"]
    assert ttft["p50"]["value_s"] <= ttft["p90"]["value_s"] <= ttft["p99"]["value_s"]
    for each in ttft.values():
        assert each["low_s"] <= each["value_s"]
    promise = read_plan(Path(plan)).prediction
    for name in ("ttft", "tpot"):
        for statistic in ("p50", "p99"):
            simulated = found["latencies"][name][statistic]["value_s"]
            assert simulated == pytest.approx(getattr(promise, name).at(statistic), rel=0.15)
    counted = sum(found["ttft_parts_s"].values())
    assert counted == pytest.approx(ttft["mean"]["value_s"], rel=1e-9)
    looks = found["over_time"]
    assert len(looks["time_s"]) == len(looks["kv_blocks"]["decode"]) > 100


def test_requests_are_written_one_a_line(sizing: Sizing, plan: str, tmp_path: Path) -> None:
    """The CSV has every request, and its phases add up to its TTFT."""
    out = tmp_path / "requests.csv"
    done = sizing("simulate", plan, "--requests", "500", "-o", str(out))
    assert done.code == 0
    assert "TTFT" in done.out
    assert "decode" in done.out
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["request"]) for row in rows] == list(range(500))
    for row in rows:
        whole = sum(float(row[f"{phase}_s"]) for phase in TTFT_PHASES)
        assert whole == pytest.approx(float(row["ttft_s"]))


def test_a_trace_replaces_arrivals_and_lengths(sizing: Sizing, plan: str, tmp_path: Path) -> None:
    """A schedule's requests are those simulated; --rate stretches their time."""
    trace, out = tmp_path / "schedule.jsonl", tmp_path / "requests.csv"
    lines = [{"due_s": k * 0.5, "input_tokens": 900 + k, "output_tokens": 3} for k in range(50)]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = sizing("simulate", plan, "--schedule", str(trace), "--rate", "10", "-o", str(out))
    assert done.code == 0
    table = np.genfromtxt(out, delimiter=",", names=True)
    np.testing.assert_allclose(table["due_s"], np.arange(50) / 10)
    np.testing.assert_array_equal(table["input_tokens"], 900 + np.arange(50))


def test_load_and_slo_of_a_plan_may_be_set(sizing: Sizing, plan: str) -> None:
    few = ("simulate", plan, "--requests", "1000")
    half = sizing(*few, "--set", "workload.requests_per_s=10", "--json")
    assert half.code == 0
    assert half.out == sizing(*few, "--rate", "10", "--json").out
    assert "missed" in sizing(*few, "--set", "slo.ttft_s=0.1").out


def test_cached_prompt_tokens_are_shown(sizing: Sizing, plan_of: Callable[..., Path]) -> None:
    """Conversations on one replica find all their earlier turns, to the last whole block."""
    path = str(plan_of(*QUICK, "--set", "model.max_context_tokens=8192"))
    asked = ("simulate", path, "--requests", "300", "--turns", "2", "--rate", "1")
    assert 0 < json.loads(sizing(*asked, "--json").out)["cached_fraction"] < 1
    assert "of the prompt tokens were in a prefix cache" in sizing(*asked).out


def test_a_simulation_at_the_pace_of_the_engines(sizing: Sizing, plan: str, tmp_path: Path) -> None:
    """Engines that took a tenth longer than planned give latencies a tenth longer, or more."""
    planned, file = read_plan(Path(plan)), tmp_path / "engine-steps.json"
    seconds = planned.step_model.decode.step_s(0, 0, 1, 100)
    write_engine_steps(
        file, {"decode": [EngineStep(k, 1.1 * seconds, 0, 0, 0, 1, 100, 0) for k in range(50)]}, 0.0
    )
    command = ("simulate", plan, "--requests", "2000", "--json")
    usual = json.loads(sizing(*command).out)
    slower = json.loads(sizing(*command, "--engine-steps", str(file)).out)
    assert "pace" not in usual
    assert slower["pace"]["decode"]["factor"] == pytest.approx(1.1)
    tpot = [found["latencies"]["tpot"]["p50"]["value_s"] for found in (usual, slower)]
    assert tpot[1] >= 1.09 * tpot[0]
    shown = sizing("simulate", plan, "--requests", "500", "--engine-steps", str(file)).out
    assert "decode steps took +10% against the plan's for the same work (50 steps)" in shown


@pytest.mark.parametrize("steps", [None, {}, {"decode": [EngineStep(1, 0.1, 0, 0, 0, 1, 9, 0)]}])
def test_steps_that_say_nothing_are_refused(
    sizing: Sizing, plan: str, tmp_path: Path, steps: dict[str, list[EngineStep]] | None
) -> None:
    """No file, no engine, or a handful of steps: what was expected is named."""
    file = tmp_path / "engine-steps.json"
    if steps is not None:
        write_engine_steps(file, steps, 0.0)
    done = sizing("simulate", plan, "--engine-steps", str(file))
    assert done.code == 2
    assert "engine-steps.json" in done.err
    assert "20 steps or more" in done.err
