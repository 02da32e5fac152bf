"""Every model of the catalog is planned for, or refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.specs.scenario import ClusterChoice, ModelChoice, SearchChoice
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from sizing import catalog
from sizing.planner.build_plan import build_plan
from sizing.planner.search import Found, search
from tests.sizing.scenarios import LARGE, inputs

ARCHITECTURES = (
    "deepseek-v3.2",  # latent attention with an index
    "gpt-oss-20b",  # windows in every second layer
    "llama-4-scout",  # long windows in three of four layers
    "mistral-7b",  # windows in all layers
    "qwen3.5-397b-a17b",  # states of linear attention in three of four layers
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_kind_of_attention_is_planned_for(name: str) -> None:
    """Sequences longer than a short window, in as many slots as the engine has."""
    load = WorkloadSpec(
        requests_per_s=0.5, input_tokens=Lengths.fixed(3000), output_tokens=Lengths.fixed(50)
    )
    cluster = ClusterChoice(preset="h200-8", max_gpus=8)
    model = ModelChoice(id=name, max_context_tokens=16384)
    scenario = replace(LARGE, model=model, cluster=cluster, workload=load, search=SearchChoice())
    given = inputs(scenario)
    answer = search(given)
    assert isinstance(answer, Found)
    plan = build_plan(given, answer)
    assert plan.prediction.ttft.p99_s <= 1.0
    assert plan.prediction.tpot.p99_s <= 0.05


@pytest.mark.campaign
@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(catalog.models())),
    preset=st.sampled_from(["a100-8", "b200-8", "gb200-nvl72", "h100-8", "l40s-8", "mi300x-8"]),
    rate=st.floats(-4, 6).map(lambda log: 2**log),
    prompt=st.integers(1, 12000),
    answer=st.integers(1, 2000),
    limits=st.builds(SloSpec, ttft_s=st.floats(0.1, 20), tpot_s=st.floats(0.005, 0.2)),
)
def test_any_scenario_has_an_answer(  # noqa: PLR0913  (a scenario's)
    name: str, preset: str, rate: float, prompt: int, answer: int, limits: SloSpec
) -> None:
    """A plan that holds its SLO, a reason why there is none, or a refusal that names a key."""
    load = WorkloadSpec(
        requests_per_s=rate,
        input_tokens=Lengths.fixed(prompt),
        output_tokens=Lengths.fixed(answer),
    )
    cluster = ClusterChoice(preset=preset, max_gpus=64)
    scenario = replace(
        LARGE, model=ModelChoice(id=name), cluster=cluster, workload=load, slo=limits,
        search=SearchChoice(),
    )  # fmt: skip
    try:
        found = search(inputs(scenario))
    except InputError as error:
        assert error.place.startswith(("test: workload.", "test: model."))
        return
    if isinstance(found, Found):
        prediction = build_plan(inputs(scenario), found).prediction
        assert prediction.ttft.p99_s <= limits.ttft_s
        assert prediction.tpot.p99_s <= limits.tpot_s
    else:
        assert found.reason
