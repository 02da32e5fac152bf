"""Plans for SGLang and TensorRT-LLM: their rules, evidence, words and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import yaml

from minicluster.engine_model.planned_limits import planned_limits
from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import Plan, plan_from, to_json
from minicluster.specs.scenario import EngineChoice
from serving.deployment.feasibility import findings, refuse
from serving.deployment.simulated import simulated_findings
from serving.deployment.target import Target
from sizing import catalog
from sizing.planner.error_model import validation
from sizing.planner.plan import plan as make_plan
from sizing.planner.studies.result import StudyResult, answer_line, cheapest
from sizing.scenario import Scenario
from sizing.stacks.formats import FORMATS, export

FOREIGN = ("sglang", "trtllm")
SMALL = {"search.pools": "mixed", "workload.requests_per_s": 5.0, "search.confidence_fraction": 0.5}
HERE = Target(
    kind="gpu", system="Linux x86_64", cores=frozenset({0}), num_gpus=8, memory_bytes=10**12,
    ray="2.60.0", vllm="0.29.0",
)  # fmt: skip


@cache
def planned(engine: str, version: str | None = None) -> Plan:
    """Return a small plan of an engine."""
    asked = {"engine.name": engine, **({"engine.version": version} if version else {})}
    return make_plan(Scenario.load("llama-3.1-8b-h100", SMALL | asked))


@pytest.mark.parametrize("engine", FOREIGN)
def test_a_plan_schedules_as_the_rows_of_its_engine_ran(engine: str) -> None:
    """Its file says the rules, and every reader of it schedules by them."""
    plan = planned(engine)
    profile = catalog.find_engine(EngineChoice(name=engine))
    assert plan.engine.rules == profile.rules(ahead=True)
    assert (plan.engine.name, plan.engine.version) == (engine, profile.version)
    read = plan_from(json.loads(to_json(plan)), place="plan.json")
    assert read == plan
    limits = planned_limits(read.deployment, read.pool("mixed"))
    assert limits.rules == plan.engine.rules
    assert [*simulated_findings(read.deployment, 1e12)] == []


def test_what_was_measured_is_of_that_engine() -> None:
    """Rows and intervals are the engine's own; a version without rows of this kind says so."""
    notes = {engine: planned(engine).validated_on.note for engine in (*FOREIGN, "vllm")}
    assert all(f"aggregated {engine} on h100-sxm (bf16)" in note for engine, note in notes.items())
    assert not any("no such rows of" in note for note in notes.values())
    experts = validation(Scenario.load("deepseek-v3-h200"), split=False).note
    assert "no such rows of vllm 0.29" in experts
    rows = {engine: planned(engine).validated_on.num_rows for engine in notes}
    assert len(set(rows.values())) == len(rows)
    factors = {planned(engine).prediction.tpot.high_factor for engine in notes}
    assert len(factors) == len(rows)


@pytest.mark.parametrize(
    ("version", "becomes"), [(None, "0.5"), ("0.5", "0.5"), ("0.5.8", "0.5.8")]
)
def test_a_release_of_a_line_keeps_its_number(version: str | None, becomes: str) -> None:
    """SGLang 0.5 stands for 0.5.x; its constants depend on the release where sources say so."""
    assert catalog.find_engine(EngineChoice(name="sglang", version=version)).version == becomes


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"name": "sglang", "version": "0.4"}, r"engine\.version is '0\.4'.*with a profile: 0\.5"),
        ({"name": "vllm", "version": "9"}, r"version of vllm with a profile: 0\.29\.0, 0\.15\.1"),
        ({"name": "tgi"}, r"engine\.name is 'tgi'.*known: vllm, sglang, trtllm"),
    ],
)
def test_unknown_engines_and_versions_name_the_known(choice: dict[str, str], says: str) -> None:
    """Whoever asks for another one sees which there are."""
    with pytest.raises(InputError, match=says):
        catalog.find_engine(EngineChoice(**choice))  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", FOREIGN)
def test_an_override_of_the_engine_leaves_the_version_of_the_file(engine: str) -> None:
    """A version looks like a number, and is a text all the same."""
    name = "llama-3.1-8b-h100"
    assert catalog.read_scenario(name).engine.version == "0.29.0"
    assert catalog.read_scenario(name, [f"engine.name={engine}"]).engine.version is None
    both = catalog.read_scenario(name, [f"engine.name={engine}", "engine.version=1.10"])
    assert both.engine.version == "1.10"


@pytest.mark.parametrize("engine", FOREIGN)
def test_export_goes_to_the_engine_of_the_plan(engine: str) -> None:
    """Formats of others are refused by name, because the plan has the rules of its own."""
    plan = planned(engine)
    assert export(plan) == export(plan, engine)
    for target in {*FORMATS} - {engine}:
        with pytest.raises(InputError, match=f"'{target}'; it has to be {engine}"):
            export(plan, target, image="image")
    if engine == "trtllm":
        settings = yaml.safe_load(export(plan)["mixed.yaml"])
        assert settings["enable_chunked_prefill"] is False


@pytest.mark.parametrize("engine", FOREIGN)
def test_serving_refuses_what_it_cannot_deploy(engine: str) -> None:
    """By its name; simulated engines serve it, as the test of the rules above shows."""
    reasons = findings(planned(engine).deployment, HERE)
    assert f"engine.name: '{engine}'; serving deploys vllm" in reasons
    with pytest.raises(NegativeAnswer, match=engine):
        refuse(reasons)


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [
        ("sglang", "watermark_fraction", 0.1),
        ("trtllm", "chunked_prefill_tokens", 512),
        ("trtllm", "kv_offload_host_bytes", 1e11),
        ("sglang", "max_loras", 2),
    ],
)
def test_settings_that_an_engine_lacks_are_refused(engine: str, key: str, value: float) -> None:
    """The message names the key and the engine."""
    adapters = {"workload.lora_adapters": 4} if key == "max_loras" else {}
    with pytest.raises(InputError, match=rf"engine\.{key} .*{engine}"):
        Scenario.load(
            "llama-3.1-8b-h100", {"engine.name": engine, f"engine.{key}": value, **adapters}
        )


def test_ties_are_named_and_then_headroom_decides() -> None:
    """The first line answers; equal costs are said to be equal."""
    one, other = planned("vllm"), planned("trtllm")
    room = replace(one.headroom, load_factor=one.headroom.load_factor + 1)
    results = [
        StudyResult(label="first", plans={"": one}),
        StudyResult(label="roomy", plans={"": replace(one, headroom=room)}),
    ]
    assert cheapest(results, "gpus") == results[1]
    answer = answer_line(results, "gpus")
    assert answer.startswith("Least gpus: roomy by its headroom: roomy (")
    assert f"need {one.cost.gpus} GPU each" in answer
    assert "a tie: first" in answer_line([results[0], results[0]], "gpus")
    single = answer_line([StudyResult(label="it", plans={"": other})], "gpus")
    assert single == f"Least gpus: it, {other.cost.gpus} GPU"
