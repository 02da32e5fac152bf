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
from sizing.planner.plan import build_plan
from sizing.planner.search import search
from sizing.planner.simulated_check import Found
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
    cluster = ClusterChoice(preset="h200-8", max_gpus=16)
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
    load=st.builds(
        WorkloadSpec,
        requests_per_s=st.floats(-4, 6).map(lambda log: 2**log),
        input_tokens=st.integers(1, 12000).map(Lengths.fixed),
        output_tokens=st.integers(1, 2000).map(Lengths.fixed),
    ),
    ttft_s=st.floats(0.1, 20),
    tpot_s=st.floats(0.005, 0.2),
)
def test_any_scenario_has_an_answer(
    name: str, preset: str, load: WorkloadSpec, ttft_s: float, tpot_s: float
) -> None:
    """A plan that holds its SLO, a reason why there is none, or a refusal that names a key."""
    scenario = replace(
        LARGE,
        model=ModelChoice(id=name),
        cluster=ClusterChoice(preset=preset, max_gpus=64),
        workload=load,
        slo=SloSpec(ttft_s=ttft_s, tpot_s=tpot_s),
        search=SearchChoice(),
    )
    try:
        given = inputs(scenario)
    except InputError as error:
        refused = error.place
    else:
        refused = ""
        found = search(given)
        if isinstance(found, Found):
            prediction = build_plan(given, found).prediction
            assert prediction.ttft.p99_s <= ttft_s
            assert prediction.tpot.p99_s <= tpot_s
        else:
            assert found.reason
    assert refused in {"", "test: workload.input_tokens + output_tokens"}
