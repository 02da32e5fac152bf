"""Two-batch overlap from a scenario's keys to the plan, its explanation and other stacks' files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from minicluster.plan import read_plan, to_json
from tests.sizing.conftest import Sizing

LOAD = {
    "search.pools": "split", "search.tp": "[1]", "search.confidence_fraction": 0.5,
    "workload.requests_per_s": 40, "workload.input_tokens": 1000, "slo.tpot_s": 0.1,
}  # fmt: skip
DEEPEP = {"engine.all_to_all": "deepep"}
OVERLAP = DEEPEP | {"engine.two_batch_overlap": "true"}

PlanOf = Callable[..., Path]


def planned(plan_of: PlanOf, **keys: object) -> Path:
    """Return the plan file of DeepSeek-V3 for a load of short prompts."""
    asked = LOAD | keys
    overrides = (part for key, value in asked.items() for part in ("--set", f"{key}={value}"))
    return plan_of("deepseek-v3-h200", *overrides)


def test_a_plan_carries_it(sizing: Sizing, plan_of: PlanOf) -> None:
    """Its file and its explanation; the budget of decode is what its kernels have room for."""
    file = planned(plan_of, **OVERLAP)
    engine = json.loads(file.read_text())["engine"]
    assert (engine["all_to_all"], engine["two_batch_overlap"]) == ("deepep", True)
    plan = read_plan(file)
    assert to_json(plan) == file.read_text()
    assert all(pool.slicing.routes_tokens for pool in plan.pools)
    decode = plan.pool("decode")
    assert decode.max_num_batched_tokens == decode.max_num_seqs < 8192
    said = sizing("explain", str(file)).out
    assert "in two halves" in said
    assert "S11" in said


def test_stacks_that_have_it_get_its_flags(sizing: Sizing, plan_of: PlanOf, tmp_path: Path) -> None:
    """Those of vLLM are read back; TensorRT-LLM has none."""
    file = str(planned(plan_of, **OVERLAP))
    script = tmp_path / "vllm.sh"
    script.write_text(sizing("export", file, "--to", "vllm").out)
    text = script.read_text()
    assert text.count("--enable-dbo") >= 2
    assert "--all2all-backend deepep_high_throughput" in text
    assert "--all2all-backend deepep_low_latency" in text
    scenario = tmp_path / "read.toml"
    read = sizing(
        "read",
        str(script),
        "--scenario",
        "deepseek-v3-h200",
        "--set",
        "workload.input_tokens=1000",
        "-o",
        str(scenario),
    )
    assert read.code == 0, read.err
    assert "two_batch_overlap = true" in scenario.read_text()
    text = sizing("export", file, "--to", "sglang").out
    for flag in ("--moe-a2a-backend deepep", "--deepep-mode normal", "--deepep-mode low_latency"):
        assert flag in text
    assert "--enable-two-batch-overlap" in text
    refused = sizing("export", file, "--to", "trtllm")
    assert refused.code == 2
    assert "TensorRT-LLM does not split a step in two" in refused.err


def test_a_plan_without_it_does_not_name_it(plan_of: PlanOf) -> None:
    """Engine settings are as before there were such keys."""
    raw = json.loads(planned(plan_of).read_text())
    for engine in (raw["engine"], raw["inputs"]["scenario"]["engine"]):
        assert not {"all_to_all", "two_batch_overlap"} & {*engine}


@pytest.mark.parametrize(("field", "value"), [("all_to_all", None), ("all_to_all", "x")])
def test_an_edited_plan_is_refused(
    sizing: Sizing, plan_of: PlanOf, tmp_path: Path, field: str, value: object
) -> None:
    """Overlap without a library, and one that there is not."""
    plan = tmp_path / "plan.json"
    raw = json.loads(planned(plan_of, **OVERLAP).read_text())
    raw["engine"][field] = value
    plan.write_text(json.dumps(raw))
    done = sizing("explain", str(plan))
    assert done.code == 2
    assert "all_to_all" in done.err
