"""The plan's file: each thing once, one value in memory, and what is refused."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from minicluster.errors import InputError
from minicluster.plan import Plan, plan_from, read_plan, to_json
from minicluster.plan.document import KEPT_AT_TOP, KEPT_OF_CALIBRATION
from minicluster.plan.json_schema import plan_schema
from minicluster.specs.calibration import CalibrationKey, CalibrationSpec
from sizing.cli.common import with_overrides
from tests import plans
from tests.sizing.conftest import QUICK

TOP = {
    *("schema_version", "model", "engine", "step_model", "inputs", "slo", "workload", "pools"),
    *("routing", "prediction", "cost", "headroom", "calibration", "validated_on", "deployable"),
    *("provenance", "confidence", "endpoint"),
}


@pytest.fixture(scope="module")
def file(plan_of: Callable[..., Path]) -> Path:
    """Return the file of a plan."""
    return plan_of(*QUICK)


@pytest.fixture(params=["datasheet", "calibrated"])
def plan(request: pytest.FixtureRequest, file: Path) -> Plan:
    """Return the plan, and as if its step times came from a calibration."""
    found = read_plan(file)
    return found if request.param == "datasheet" else calibrated(found)


def calibrated(plan: Plan) -> Plan:
    """Return the plan with step times of a calibration."""
    key = CalibrationKey(
        processor="made up",
        cores=1,
        engine=plan.engine.name,
        engine_version=plan.engine.version,
        model_config_hash=plan.model.config_hash,
        dtype=plan.model.weight_dtype,
    )
    fitted = {"prefill": plans.STEP, "decode": replace(plans.STEP, base_s=0.002)}
    model = replace(plan.step_model, **fitted)
    steps = {f.name: getattr(model, f.name) for f in fields(model)}
    calibration = CalibrationSpec(name="made up", date="2026-11-20", key=key, num_rows=3, **steps)
    return replace(plan, inputs=replace(plan.inputs, calibration=calibration), step_model=model)


def objects(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each object of two fields or more as text, and where it stands."""
    if isinstance(value, dict):
        if len(value) > 1:
            yield json.dumps(value, sort_keys=True), path
        for key, each in value.items():
            if key not in {"placement", "sources", "collectives"}:
                yield from objects(each, f"{path}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from objects(each, f"{path}[{number}]")


def test_each_thing_is_said_once(plan: Plan) -> None:
    """No object stands in the file twice, nor in the inputs what stands at the top."""
    raw = json.loads(to_json(plan))
    assert raw.keys() == TOP
    assert raw["schema_version"] == 3
    seen: dict[str, str] = {}
    for text, path in objects(raw):
        assert text not in seen, (path, seen[text])
        seen[text] = path
    kept = dict(KEPT_AT_TOP)
    if plan.inputs.calibration is not None:
        kept |= KEPT_OF_CALIBRATION
        assert raw["inputs"]["calibration"].keys() == {"key", "num_rows"}
    for top, inside in kept.items():
        *tables, key = inside.split(".")
        assert key not in functools.reduce(operator.getitem, tables, raw["inputs"]), (top, inside)


def test_a_plan_comes_back_the_same(plan: Plan) -> None:
    """What is read is what was written, and writing it again gives the same bytes."""
    text = to_json(plan)
    again = plan_from(json.loads(text), place="plan.json")
    assert again == plan
    assert to_json(again) == text


def test_the_json_schema_takes_plans_and_nothing_else(plan: Plan) -> None:
    """What `sizing schema --plan` prints; a field too many, missing, or of another type is none."""
    Draft202012Validator.check_schema(plan_schema())
    validator = Draft202012Validator(plan_schema())
    raw = json.loads(to_json(plan))
    assert [error.message for error in validator.iter_errors(raw)] == []
    edits: tuple[dict[str, Any], ...] = (
        {"more": 1}, {"schema_version": 2}, {"pools": None}, {"slo": {"ttft_s": "fast"}},
        {"model": {"id": "x"}}, {"engine": raw["engine"] | {"cores": 2}},
        {"inputs": raw["inputs"] | {"model": raw["inputs"]["model"] | {"id": "twice"}}},
    )  # fmt: skip
    assert not any(validator.is_valid(raw | edit) for edit in edits)


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        *(
            (
                ("schema_version",),
                version,
                f"plan.json: schema_version {found}; it has to be 3 (plan again",
            )
            for version, found in ((2, "is 2"), (4, "is 4"), (None, "is missing"))
        ),
        (
            ("inputs", "scenario", "slo"),
            {},
            "inputs.scenario.slo is set, but there is no such key: a plan says it once, in",
        ),
        (("inputs", "engine", "name"), "x", "a plan says it once, in engine.name"),
        (("more",), 1, "plan.json: more is 1, but there is no such field in a plan"),
        (("cost", "gpus"), 1, "cost.gpus is 1; it has to be "),
        (
            ("calibration", "name"),
            "another",
            "calibration.name is 'another'; it has to be 'h100-sxm",
        ),
        (("model", "layers"), 3, "model.layers is 3, but there is no such key"),
        (("workload", "requests_per_s"), "many", "plan.json: workload.requests_per_s is 'many'"),
        (("cost",), None, "plan.json: cost is missing"),
        (("inputs",), [1, 2], "plan.json: inputs is [1, 2]"),
        (("step_model", "decode", "tokens"), "x", "step_model.decode.StepTable.tokens is 'x'"),
        (
            ("step_model", "decode", "sequences"),
            [0.0, 0.0],
            "sequences is [0.0, 0.0]; it has to be two",
        ),
        (("pools", -1, "dtype"), "fp8", "dtype is 'fp8'; it has to be 'bf16', as in the inputs"),
    ],
)
def test_a_file_that_contradicts_itself(
    file: Path, where: tuple[Any, ...], value: object, says: str
) -> None:
    """The message has the place in the file, the value and what is expected."""
    raw = json.loads(file.read_text(encoding="utf-8"))
    *tables, key = where
    functools.reduce(operator.getitem, tables, raw)[key] = value
    with pytest.raises(InputError) as refused:
        plan_from(raw, place="plan.json")
    assert says in str(refused.value)


def test_an_override_changes_the_only_copy(file: Path) -> None:
    """`--set` of `sizing simulate`: load and SLO are those of the scenario, before and after."""
    plan = read_plan(file)
    changed = with_overrides(plan, ["workload.requests_per_s=3", "slo.ttft_s=7"], "plan.json")
    assert (changed.workload.requests_per_s, changed.slo.ttft_s) == (3, 7)
    assert changed.inputs.scenario.workload is changed.workload
    assert changed.inputs.scenario.slo is changed.slo
    assert changed.under(workload=plan.workload, slo=plan.slo) == plan
    assert json.loads(to_json(changed))["workload"]["requests_per_s"] == 3
