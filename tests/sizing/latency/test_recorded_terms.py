"""
Terms of steps and memory of machines unlike one another, as recorded: a change of one is meant.

`python -m tests.sizing.latency.test_recorded_terms` records anew; the difference belongs into the
commit that changes a term, with its reason.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.collectives import path_coefficients
from sizing.latency.memory import activation_bytes, kv_space_bytes, stage_weight_bytes
from sizing.latency.op import StepLoad
from sizing.latency.step import interval_s, stage_terms, step_terms
from sizing.latency.term import AMOUNTS, Machine
from sizing.planner.studies.long_context import chunked_prefill

RECORDED = Path(__file__).with_suffix(".json")

MACHINES: dict[str, tuple[str, str, str, Slicing, dict[str, Any]]] = {
    "dense": ("llama-3.1-8b", "h100-8", "vllm", Slicing(), {}),
    "dense, 2 nodes, sglang": ("llama-3.1-70b", "h200-8", "sglang", Slicing(tp=16), {}),
    "dense, 7:1 spine": ("llama-3.1-405b", "roce-24k", "vllm", Slicing(tp=16), {}),
    "dense, pipeline, fp8": ("qwen3-32b", "a100-8", "trtllm", Slicing(tp=2, pp=2), {}),
    "not gated": ("falcon-180b", "h100-8", "trtllm", Slicing(tp=8), {}),
    "parallel attention": ("gpt-j-6b", "l40s-8", "vllm", Slicing(), {}),
    "experts": ("mixtral-8x7b", "h100-8", "vllm", Slicing(tp=2), {}),
    "experts, attention slides": ("gpt-oss-120b", "h100-8", "trtllm", Slicing(tp=4, ep=4), {}),
    "latent attention, groups": (
        "deepseek-v3", "h200-8", "vllm", Slicing(tp=2, dp=4, ep=8), {},
    ),
    "latent attention, wide": (
        "deepseek-v3", "gb200-nvl72", "sglang", Slicing(dp=32, ep=32), {"redundant_experts": 32},
    ),
    "drafts": (
        "deepseek-v3", "h200-8", "vllm", Slicing(tp=8),
        {"speculative_tokens": 2, "mean_accepted_tokens": 1.3},
    ),
    "sparse attention": ("glm-5", "b200-8", "sglang", Slicing(tp=8), {}),
    "linear attention": ("qwen3.5-397b-a17b", "b200-8", "sglang", Slicing(tp=4, ep=4), {}),
    "query norms": ("minimax-m2.5", "b300-8", "vllm", Slicing(tp=4), {}),
}  # fmt: skip
"""Model, cluster, engine, slicing, and keys of the engine."""

LOAD = StepLoad(
    prompts=np.array([1.0, 0.0, 2.0]),
    prompt_tokens=np.array([3000.0, 0.0, 700.0]),
    cached_tokens=np.array([0.0, 0.0, 1000.0]),
    sequences=np.array([0.0, 48.0, 9.0]),
    context_tokens=np.array([0.0, 5000.0, 800.0]),
)
"""A prompt, a batch that decodes, and a mixed step."""


def machine(name: str) -> tuple[Machine, Slicing]:
    model, preset, engine, slicing, keys = MACHINES[name]
    cluster = replace(catalog.clusters()[preset], max_gpus=64)
    gpu = catalog.find_gpu(cluster.gpu)
    if cluster.tiers:
        cluster = replace(cluster, pools_meet_in=cluster.tiers[-1].name)
    profile = next(each for each in catalog.engines() if each.name == engine).on(gpu)
    spec = catalog.find_model(model, drafts="speculative_tokens" in keys)
    copies = keys.pop("redundant_experts", None) if (keys := {**keys}) else None
    if copies is not None and spec.moe is not None:
        spec = replace(spec, moe=replace(spec.moe, redundant_experts=copies))
    return Machine(model=spec, gpu=gpu, cluster=cluster, engine=replace(profile, **keys)), slicing


def recorded(name: str) -> dict[str, Any]:
    """Return what is recorded of a machine."""
    here, slicing = machine(name)
    terms = step_terms(here, LOAD, slicing=slicing)
    chunked = chunked_prefill(here, 20_000, slicing=slicing)
    path = path_coefficients(here, prefill_tp=slicing.tp, decode_tp=2 * slicing.tp, tokens=3000.0)
    found = {
        "terms": {
            f"{at} {each.name}": [each.equation, each.dtype, each.bound]
            + [
                np.broadcast_to(part, LOAD.prompts.shape).tolist()
                for part in (each.seconds, each.launch_s, each.flops, each.hbm_bytes)
            ]
            for at, each in enumerate(terms)
        },
        "stages": [[each.name, s.tolist()] for each, s in stage_terms(here, LOAD, slicing=slicing)],
        "interval_s": interval_s(here, LOAD, slicing=slicing, batches=2).tolist(),
        "chunked": [chunked.seconds, chunked.chunks, chunked.parts_s],
        "weight_bytes": stage_weight_bytes(here.model, slicing),
        "activation_bytes": activation_bytes(here.model, here.engine, slicing=slicing),
        "kv_space_bytes": kv_space_bytes(here.model, here.gpu, here.engine, slicing=slicing),
        "pull": [path.transfer_per_token_s, path.uplink_per_token_s],
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MACHINES)
def test_terms_are_those_recorded(name: str) -> None:
    found, known = flat(recorded(name)), flat(json.loads(RECORDED.read_text())[name])
    assert found.keys() == known.keys()
    wrong = {
        key: (known[key], value)
        for key, value in found.items()
        if value
        != (pytest.approx(known[key], rel=1e-6) if isinstance(value, float) else known[key])
    }
    assert wrong == {}


@pytest.mark.parametrize("name", MACHINES)
def test_no_part_of_a_term_is_negative_or_longer_than_it(name: str) -> None:
    here, slicing = machine(name)
    for term in step_terms(here, LOAD, slicing=slicing):
        assert all(np.all(np.asarray(getattr(term, part)) >= 0) for part in AMOUNTS), term.name
        whole_s = (term.seconds + term.hidden_s) * (1 + 1e-9)
        for part_s in (term.compute_s, term.memory_s, term.network_s, term.launch_s):
            assert np.all(part_s <= whole_s), term.name


def flat(value: object, key: str = "") -> dict[str, object]:
    """Return the leaves of a document by their places."""
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = dict(enumerate(value)).items()
    else:
        return {key: float(value) if isinstance(value, int) else value}
    return {k: v for name, each in inner for k, v in flat(each, f"{key}/{name}").items()}


def rounded(value: Any) -> Any:  # noqa: ANN401
    """Write numbers with seven digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":
    table = {name: rounded(recorded(name)) for name in MACHINES}
    RECORDED.write_text(json.dumps(table, separators=(",", ":"), sort_keys=True) + "\n")
