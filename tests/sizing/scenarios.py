"""Scenarios that tests of the search plan: 8B, which takes a second, and 70B where it matters."""

from __future__ import annotations

from dataclasses import replace

from minicluster.plan import Inputs, Plan
from minicluster.specs.scenario import ClusterChoice, ModelChoice, ScenarioSpec, SearchChoice
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from sizing import catalog
from sizing.planner.plan import build_plan
from sizing.planner.search import search
from sizing.planner.simulated_check import Found

LARGE = ScenarioSpec(
    model=ModelChoice(id="llama-3.1-70b"),
    cluster=ClusterChoice(preset="h100-8", max_gpus=512),
    workload=WorkloadSpec(
        requests_per_s=20.0, input_tokens=Lengths.fixed(4000), output_tokens=Lengths.fixed(500)
    ),
    search=SearchChoice(pools="split"),
)
SMALL = replace(LARGE, model=ModelChoice(id="llama-3.1-8b"))


def inputs(scenario: ScenarioSpec = SMALL) -> Inputs:
    """Return a scenario with what it names."""
    return catalog.inputs_of(scenario, "test")


def at(rate: float, scenario: ScenarioSpec = SMALL, **slo: float) -> Inputs:
    """Return a scenario at another rate and SLO."""
    load = replace(scenario.workload, requests_per_s=rate)
    limits = SloSpec(**{"ttft_s": 1.0, **slo})  # type: ignore[arg-type]
    return inputs(replace(scenario, workload=load, slo=limits))


_FOUND: dict[str, Found] = {}
_PLANS: dict[str, Plan] = {}


def found(given: Inputs) -> Found:
    """Return the plan's configuration, which there must be; equal inputs are searched once."""
    key = repr(given)
    if key not in _FOUND:
        answer = search(given)
        assert isinstance(answer, Found), answer
        _FOUND[key] = answer
    return _FOUND[key]


def proposed(given: Inputs) -> Plan:
    """Return the plan; equal inputs are planned once."""
    key = repr(given)
    if key not in _PLANS:
        _PLANS[key] = build_plan(given, found(given))
    return _PLANS[key]


LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The config.json of a small model, as Hugging Face writes it."""
