"""`sizing plan`, `predict`, `explain`: streams, exit codes, files, and two golden plans."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minicluster.plan import plan_from, read_plan, to_json
from sizing import catalog
from sizing.catalog.endpoint import endpoint_cost
from sizing.report.plan_screen import answer_facts, next_commands, plan_sections
from sizing.report.terminal import print_sections
from tests.sizing.conftest import GOLDEN, QUICK, Sizing

H100 = str(catalog.files("scenarios")["llama-3.1-70b-h100"])


def outline(plan: dict[str, Any]) -> dict[str, Any]:
    """Return what a golden plan keeps: layout, KV space, verdicts, latencies."""
    kept = ("replicas", "tp", "max_num_seqs")
    prediction = plan["prediction"]
    return {
        "pools": {pool["role"]: {key: pool[key] for key in kept} for pool in plan["pools"]},
        "kv_mb": {pool["role"]: round(pool["kv_bytes"] / 1e6) for pool in plan["pools"]},
        "gpus": plan["cost"]["gpus"],
        "bottleneck": prediction["bottleneck"],
        "ttft_p99_s": prediction["ttft"]["p99_s"],
        "tpot_p99_s": prediction["tpot"]["p99_s"],
        "capacity_requests_per_s": prediction["capacity_requests_per_s"],
    }


def test_a_plan_beyond_one_endpoint_process_says_so(sizing: Sizing, tmp_path: Path) -> None:
    """With cores and memory; other plans say nothing of it, and `explain` always does."""
    path = tmp_path / "plan.json"
    assert sizing("plan", H100, "-o", str(path), "--json").code == 0
    plan = read_plan(path)
    assert plan.endpoint is not None
    assert plan.endpoint.processes == 1
    assert "Endpoint" not in sizing("plan", H100).out
    assert "1 process and a gate" in sizing("explain", str(path)).out
    load = endpoint_cost().load(requests_per_s=500, output_tokens_per_s=250_000, streams=20_000)
    rate = replace(plan.inputs.scenario.workload, requests_per_s=500.0)
    large = replace(plan.under(workload=rate), endpoint=load)
    said = dict(answer_facts(large))["Endpoint"]
    assert said.startswith(f"{load.processes} processes and a gate")
    assert "the gate is the first limit" in said
    unknown = replace(large, endpoint=None)
    assert "Endpoint" not in dict(answer_facts(unknown))
    assert plan_from(json.loads(to_json(large)), place="plan") == large


def check_golden(name: str, plan: dict[str, Any]) -> None:
    """Compare with a golden outline; `GOLDEN=write` rewrites it, and the diff is reviewed."""
    path = GOLDEN / f"{name}.plan.json"
    found = outline(plan)
    if os.environ.get("GOLDEN") == "write":
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    expected = json.loads(path.read_text(encoding="utf-8"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        wanted = pytest.approx(value, rel=0.01) if isinstance(value, float) else value
        assert found[key] == wanted, key


def test_golden_h100(sizing: Sizing, tmp_path: Path) -> None:
    """
    The shipped 70B scenario gives the plan it gave, on a screen of 22 lines of 80 columns.

    GPUs, layout, latency beside the SLO, headroom, evidence and the next commands are on it.
    """
    path = tmp_path / "plan.json"
    done = sizing("plan", H100, "-o", str(path), "--json")
    assert (done.code, done.err) == (0, "")
    assert path.read_text(encoding="utf-8") == done.out
    check_golden("llama-3.1-70b-h100", json.loads(done.out))
    assert list(tmp_path.iterdir()) == [path]

    console = Console(width=80, file=StringIO())
    with console.capture() as screen:
        plan = read_plan(path)
        print_sections([*plan_sections(plan), next_commands(plan, None, verbose=False)], console)
    for word in ("prefill", "decode", "compute", "memory bandwidth", "holds", "Headroom", "nodes"):
        assert word in screen.get(), word
    assert screen.get().count(": holds") == 2
    assert "missed" not in screen.get()
    assert "no measurement of split vllm" in screen.get()
    assert "sizing explain plan.json" in screen.get()
    lines = screen.get().splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80


def test_golden_laptop(
    sizing: Sizing, laptop: tuple[str, ...], plan_of: Callable[..., Path]
) -> None:
    """A calibrated machine plans one core a pool, and explain shows the interference."""
    path = plan_of(*laptop)
    plan = read_plan(path)
    check_golden("laptop", json.loads(path.read_text(encoding="utf-8")))
    assert plan.calibration.name == "made-up"
    assert plan.validated_on.num_rows == 40
    assert plan.step_model.interference.decode_fraction == 0.2
    assert "steps take longer by" in sizing("explain", str(path)).out
    data = json.loads(sizing("explain", str(path), "--json").out)
    assert data["interference"]["decode"] > 0
    (cache,) = (each for each in data["terms"] if each["name"] == "KV cache")
    read = data["mean_batch"] * data["mean_context_tokens"]
    assert cache["seconds"] == pytest.approx(plan.step_model.decode.per_context_token_s * read)


def test_a_calibrated_prefill_that_reads_weights_is_bound_by_them(
    laptop: tuple[str, ...], plan_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The mean prompt computes for 38 ms of the 45 ms that the weights take to be read."""
    constants = json.loads(Path(laptop[-1]).read_text(encoding="utf-8"))
    constants["prefill"]["stream_s"] = 0.045
    streams = tmp_path / "streams.json"
    streams.write_text(json.dumps(constants))
    for calibration, bound in ((laptop[-1], "compute"), (str(streams), "memory bandwidth")):
        plan = read_plan(plan_of(*laptop[:-1], calibration))
        assert plan.prediction.bottleneck["prefill"] == bound


def test_verbose_shows_every_table(sizing: Sizing) -> None:
    """Batch limits, all percentiles, the step times simulated and other confidences are added."""
    done = sizing("plan", *QUICK, "--verbose")
    assert done.code == 0
    added = ("Layout", "KV/GPU", "p50", "E2E", "saturates at", "Simulated")
    assert [words for words in added if words not in done.out] == []


def test_predict(sizing: Sizing, laptop: tuple[str, ...]) -> None:
    """Capacity and utilisation of a named configuration; a missed SLO is said and exits 3."""
    given = ("--prefill", "1xTP1", "--decode", "1xtp1")
    done = sizing("predict", *laptop, *given, "--json")
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    capacity = answer["prediction"]["capacity_requests_per_s"]
    assert answer["meets_slo"] is True
    assert answer["prediction"]["utilisation_fraction"]["prefill"] < 1
    missed = sizing("predict", *laptop, *given, "--set", "slo.ttft_s=0.01")
    assert missed.code == 3
    assert "SLO missed: TTFT p99" in missed.out
    for load in (1.04, 2.0):  # the first only because the pools slow one another
        rate = f"workload.requests_per_s={load * capacity}"
        over = sizing("predict", *laptop, *given, "--set", rate)
        assert (over.code, over.out) == (3, "")
        assert "saturate" in over.err


def test_explain_and_an_edited_plan(
    sizing: Sizing, plan_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Each op has its equation and bound; a plan whose pools cannot carry its load is refused."""
    plan = plan_of(*QUICK)
    data = json.loads(sizing("explain", str(plan), "--json").out)
    ops = {term["name"]: term for term in data["terms"] if term["of"] == "prefill step"}
    up = ops["mlp up"]
    assert (up["bound"], up["equation"]) == ("compute", "W4")
    assert 0.5 < up["achieved_fraction"] < 1
    assert up["flops"] > 0

    path = tmp_path / "plan.json"
    raw = json.loads(plan.read_text(encoding="utf-8"))
    raw["workload"]["requests_per_s"] = 1e6
    path.write_text(json.dumps(raw))
    done = sizing("explain", str(path))
    assert done.code == 2
    assert "carry the plan's load" in done.err


@pytest.mark.parametrize(
    ("change", "says", "binds"),
    [
        ("model.id=llama-3.1-405b", "fits on no allowed layout", "capacity"),
        ("slo.ttft_s=1e-6", "no number of h100-sxm holds the SLO", "SLO floor"),
        ("slo.tpot_s=0.001", "TPOT p99 of a request without any load is already", "SLO floor"),
        ("slo.ttft_s=0.5", "to change: cluster.max_gpus = 3", "max_gpus"),
        ("workload.requests_per_s=80", "(an estimate), cluster.max_gpus is 2", "max_gpus"),
    ],
)
def test_no_plan(sizing: Sizing, tmp_path: Path, change: str, says: str, binds: str) -> None:
    """An SLO or a model beyond the budget is answered with three lines, or data, and code 3."""
    path = tmp_path / "plan.json"
    asked = ("plan", *QUICK, "--set", "cluster.max_gpus=2", "--set", change, "-o", str(path))
    done = sizing(*asked)
    assert (done.code, done.out, path.exists()) == (3, "", False)
    assert says in done.err
    assert "LoRA" not in done.err
    assert len(done.err.strip().splitlines()) <= 3
    assert json.loads(sizing(*asked, "--json").out)["infeasible"]["binds"] == binds


def test_a_calibration_of_something_else(sizing: Sizing, laptop: tuple[str, ...]) -> None:
    """A calibration of another model, of TP 1 for TP 2, or none where one is needed, is refused."""
    wide = ("predict", *laptop, "--prefill", "1xTP2", "--decode", "1xTP1")
    for arguments, words in (
        (("plan", H100, "--calibration", laptop[-1]), ["model_config_hash"]),
        (wide, ["TP 1"]),
        (("plan", *laptop[:-2]), ["sizing calibrate", "serving measure"]),
    ):
        done = sizing(*arguments)
        assert done.code == 2
        assert [each for each in words if each not in done.err] == []


def test_aggregated_pools_are_planned_predicted_and_explained(
    sizing: Sizing, plan_of: Callable[..., Path]
) -> None:
    """A small load's plan is one pool; predict says the same of it; its phases add up."""
    small = (QUICK[0], "--set", "workload.requests_per_s=5", "--set", "search.tp=[1]")
    path = plan_of(*small)
    plan = read_plan(path)
    assert [pool.role for pool in plan.pools] == ["mixed"]
    assert plan.validated_on.num_rows > 0
    assert plan.deployable.ok
    assert plan.prediction.ttft.p99_s <= plan.slo.ttft_s
    assert plan.headroom.load_factor >= 1
    pool = plan.pool("mixed")
    done = sizing("predict", *small, "--mixed", f"{pool.replicas}xTP{pool.tp}", "--json")
    said = json.loads(done.out)["prediction"]
    assert said["ttft"]["p99_s"] == pytest.approx(plan.prediction.ttft.p99_s)
    terms = json.loads(sizing("explain", str(path), "--json").out)["terms"]
    phases = sum(term["seconds"] for term in terms if term["of"] == "TTFT")
    assert phases == pytest.approx(plan.prediction.ttft.mean_s, rel=1e-6)
    full = sizing("predict", *small, "--mixed", "1xTP1", "--set", "workload.requests_per_s=99")
    assert full.code == 3
    assert "saturate --mixed 1xTP1" in full.err


@pytest.mark.parametrize(("tp", "apart"), [(1, False), (8, True)])
def test_pools_placed_further_apart_than_planned_are_warned_of(
    sizing: Sizing, plan_of: Callable[..., Path], tmp_path: Path, tp: int, *, apart: bool
) -> None:
    """Replicas of a whole HB domain meet in a rack, whatever the plan counted on."""
    near = ("--set", "cluster.preset=dgx-h100", "--set", "cluster.pools_meet_in=hb")
    plan = plan_of(*QUICK, *near, "--set", f"search.tp=[{tp}]")
    done = sizing("place", str(plan), "-o", str(tmp_path / "placed.json"))
    assert done.code == 0
    assert ("plan again with cluster.pools_meet_in=rack" in done.err) is apart


@pytest.mark.parametrize("pools", ["split", "mixed"])
def test_answers_of_one_token(sizing: Sizing, pools: str, tmp_path: Path) -> None:
    """No gap follows the only token; the plan is made, drawn, simulated and explained."""
    path, page = str(tmp_path / "plan.json"), str(tmp_path / "plan.html")
    keys = ("--set", "workload.output_tokens=1", "--set", f"search.pools={pools}")
    assert sizing("plan", *QUICK, *keys, "-o", path, "--html", page).code == 0
    assert Path(page).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sizing("explain", path).code == 0
    done = sizing("simulate", path, "--requests", "500", "--json")
    assert "ttft" in json.loads(done.out)["latencies"]


def test_questions_about_a_calibrated_machine(sizing: Sizing, laptop: tuple[str, ...]) -> None:
    """No confidence is claimed where nothing says how far off the steps are; users are planned."""
    users = (*laptop, "--set", "workload.users=4", "--set", "workload.think_s=2")
    found = json.loads(sizing("capacity", *users, "--gpus", "2", "--json").out)
    assert (found["confidence_fraction"], found["think_s"]) == (None, 2)
    assert "steps as calibrated; users think 2 s" in sizing("capacity", *users, "--gpus", "2").out
    assert "confidence" in sizing("decisions", *laptop, "--only", "confidence").err
    planned = json.loads(sizing("plan", *users, "--json").out)
    sent = 4 / (planned["prediction"]["e2e"]["mean_s"] + 2)
    assert sent <= planned["workload"]["requests_per_s"] <= 1.03 * sent
    at = f"{planned['workload']['requests_per_s']:g} requests/s (4 users, 2 s think time)"
    named = ("--prefill", "1xTP1", "--decode", "1xTP1")
    for command in (("plan", *users), ("predict", *users, *named)):
        assert at in sizing(*command).out
