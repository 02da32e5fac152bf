"""`import sizing`: what is public, how it is asked, and how results show themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sizing
from minicluster.errors import InputError, NegativeAnswer
from minicluster.pages import shown
from minicluster.plan import Plan, plan_from, to_json
from sizing.catalog.schema import scenario_keys
from tests.sizing.evidence.rows import CELLS, write_rows

BASE = "llama-3.1-8b-h100"
QUICK = {"workload.requests_per_s": 2, "search.pools": "mixed", "search.tp": [1]}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sizing.plan(sizing.Scenario.load(BASE, QUICK))


def test_public_names_are_there_documented_and_lazy() -> None:
    """Each has a docstring; `import sizing` alone imports nothing heavy."""
    for name in sizing.__all__:
        assert getattr(sizing, name).__doc__
    assert set(sizing.__all__) <= set(dir(sizing))
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = sizing.plans  # type: ignore[attr-defined]
    code = "import sizing, sys; print(sorted({'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_overrides_are_values_or_texts_of_the_command() -> None:
    """Both ways give the same scenario, at once or later; `None` takes a key away."""
    texts = ["workload.requests_per_s=2", "search.pools=mixed", "search.tp=[1]"]
    asked = sizing.Scenario.load(BASE, QUICK)
    assert asked == sizing.Scenario.load(Path(BASE), texts)
    assert asked == sizing.Scenario.load(BASE).with_(QUICK)
    limited = asked.with_({"engine.max_num_seqs": 8})
    assert limited != asked
    assert limited.with_({"engine.max_num_seqs": None}) == asked
    for overrides, says in (
        ({"workload.requests_per_s": -1}, "workload.requests_per_s=-1: workload.requests_per_s"),
        ({"model.id.x": 1}, "inside a table"),
        ({"slo.ttft": 1}, "no such key"),
    ):
        with pytest.raises(InputError, match=says):
            asked.with_(overrides)


OPTIONAL = [
    key.key
    for key in scenario_keys()
    if not key.required and not key.key.startswith("workload.classes.")
]


@pytest.mark.parametrize("key", OPTIONAL)
def test_a_key_that_is_taken_away_is_at_its_default(key: str) -> None:
    asked = sizing.Scenario.load(BASE)
    if "put_tokens" not in key and key not in {"cluster.preset", "cluster.gpu"}:
        assert key not in asked.with_({key: None}).set_keys()


def test_a_scenario_is_written_as_the_file_that_it_is(tmp_path: Path) -> None:
    asked = sizing.Scenario.load(
        BASE,
        {**QUICK, "search.prices_usd_per_gpu_hour": {"h100-sxm": 2.5}, "model.kv_dtype": "fp8"},
    )
    path = tmp_path / "mine.toml"
    path.write_text(asked.to_toml())
    assert sizing.Scenario.load(path) == asked


def test_a_plan_is_the_one_of_the_command(plan: Plan) -> None:
    """Its file reads as the same plan, whatever class its inputs are of."""
    again = plan_from(json.loads(to_json(plan)), place="plan")
    assert again == plan
    assert plan == again
    assert again.inputs == plan.inputs


def test_no_plan_says_why() -> None:
    with pytest.raises(sizing.NoPlan) as found:
        sizing.plan(sizing.Scenario.load(BASE, {**QUICK, "slo.ttft_s": 0.001}))
    assert isinstance(found.value, NegativeAnswer)
    assert found.value.infeasible.binds == "SLO floor"
    assert "to change: " in str(found.value)


def test_requests_are_drawn_or_given(plan: Plan) -> None:
    """A rate stretches given requests and replaces the plan's; progress ends at all of them."""
    told: list[tuple[int, int]] = []
    run = sizing.simulate(
        plan, requests=300, requests_per_s=4, progress=lambda *seen: told.append(seen)
    )
    assert len(run.due_s) == 300
    assert {total for _, total in told} == {300}
    assert (299 / run.due_s[-1]) == pytest.approx(4, rel=0.2)
    closed = sizing.simulate(plan, sizing.RequestSource(users=2), requests=50)
    assert closed.e2e_s.max() < 10


def test_results_show_themselves_and_become_frames(plan: Plan) -> None:
    """Each has a heading and escaped HTML; columns are as long as what they are of."""
    asked = sizing.Scenario.load(BASE, QUICK)
    run = sizing.simulate(plan, requests=100)
    terms = sizing.explain_plan(plan)
    named = sizing.predict(asked, mixed="1xTP1")
    for result, count in (
        (plan, 1), (plan.prediction, 4), (run, 100), (terms, len(terms.terms)), (asked, 1),
        (named, 1),
    ):  # fmt: skip
        html = result._repr_html_()
        assert html is None or html.startswith("<section><h2>")
        assert "<script" not in (html or "")
        assert len(result.to_frame()) == count, type(result)
    assert np.array_equal(run.to_frame()["ttft_s"], run.ttft_s)
    assert plan.to_frame()["gpus"].sum() == plan.cost.gpus


def test_without_pandas_a_frame_is_refused_with_a_way_out(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install pandas"):
        plan.to_frame()


def test_measured_rows_are_validated(tmp_path: Path) -> None:
    """Rows come back in the order of the file; one that cannot be predicted says why."""
    cells = CELLS | {"ttft_s": "0.5", "tpot_s": "0.02"}
    path = write_rows(tmp_path / "rows.csv", cells, cells | {"id": "two", "gpu": "none"})
    found = sizing.validate(path)
    frame = found.to_frame()
    assert list(frame["id"]) == ["one", "two"]
    assert list(frame["status"]) == ["predicted", "unsupported"]
    assert found.errors[0].rows == 2
    assert found._repr_html_().startswith("<section><h2>Rows without errors")
