"""Limits of the scheduler: defaults by device, what a scenario asks for, what is planned."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.plan import Deployment, Inputs
from minicluster.plan.vllm_args import vllm_arguments
from minicluster.specs.scenario import EngineChoice
from serving.deployment.engine_args import planned_facts
from sizing import catalog
from sizing.catalog.scenario import scenario_from
from sizing.planner.candidates import one_replica_each
from sizing.planner.deployment import deployment
from sizing.planner.layout import Layout
from sizing.planner.step_models import StepModels

GPUS = ("h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm", "l40s")


def raw(gpu: str = "h100-sxm", **engine: object) -> dict[str, Any]:
    """Return a small scenario with keys of `[engine]`."""
    return {
        "model": {"id": "llama-3.1-8b"},
        "cluster": {"gpu": gpu, "gpus_per_node": 8, "max_gpus": 16},
        "workload": {"requests_per_s": 1.0, "input_tokens": 4000, "output_tokens": 200},
        "engine": engine,
    }


def inputs(gpu: str = "h100-sxm", **engine: object) -> Inputs:
    """Return that scenario with everything that it names."""
    scenario = scenario_from(raw(gpu, **engine), place="s")
    return catalog.inputs_of(scenario, "s")


@cache
def deployed(gpu: str = "h100-sxm", **engine: object) -> Deployment:
    """Return one prefill and one decode replica at TP 1."""
    given_inputs = inputs(gpu, **engine)
    layout = Layout.split(1, 1, gpu)
    return deployment(given_inputs, one_replica_each(StepModels(given_inputs), layout))


@pytest.mark.parametrize(
    ("device", "block", "sequences", "tokens"),
    [
        ("h100-sxm", 16, 1024, 8192),
        ("h200-sxm", 16, 1024, 8192),
        ("b200-sxm", 16, 1024, 16384),
        ("mi300x", 16, 1024, 16384),
        ("a100-sxm", 16, 256, 2048),
        ("l40s", 16, 256, 2048),
        ("cpu", 32, 128, 2048),
    ],
)
def test_defaults_of_vllm_by_device(device: str, block: int, sequences: int, tokens: int) -> None:
    """As `EngineArgs.get_batch_defaults` of vLLM 0.29.0 has them for the API server."""
    engine = catalog.find_engine(EngineChoice(version="0.29")).on(catalog.find_gpu(device))
    found = (engine.block_size, engine.max_num_seqs, engine.max_num_batched_tokens)
    assert found == (block, sequences, tokens)
    assert engine.on(catalog.find_gpu("h100-sxm")) == engine  # what is settled stays


@given(
    gpu=st.sampled_from(GPUS),
    tokens=st.none() | st.integers(16, 20_000),
    sequences=st.none() | st.integers(1, 2048),
    chunk=st.none() | st.integers(16, 2048),
    blocks=st.none() | st.integers(1, 8),
)
def test_what_is_asked_for_is_planned_or_refused(
    gpu: str, tokens: int | None, sequences: int | None, chunk: int | None, blocks: int | None
) -> None:
    """A plan has every setting as asked, and never more sequences than tokens in a step."""
    asked = {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": sequences,
        "chunked_prefill_tokens": chunk,
        "block_size": None if blocks is None else 16 * blocks,
    }
    asked = {key: value for key, value in asked.items() if value is not None}
    budget = tokens or inputs(gpu).engine_on(gpu).max_num_batched_tokens
    if max(sequences or 0, chunk or 0) > budget:
        with pytest.raises(InputError, match="max_num_batched_tokens"):
            inputs(gpu, **asked)
        return
    engine = inputs(gpu, **asked).engine_on(gpu)
    assert {key: getattr(engine, key) for key in asked} == asked
    assert engine.max_num_seqs <= engine.max_num_batched_tokens


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("max_num_seqs", 0, "is 0; it has to be .*1 to 65,536"),
        ("max_num_seqs", 1.5, r"is 1\.5; it has to be .*a whole number"),
        ("max_num_seqs", 9000, r"8,192.* \(set engine\.max_num_batched_tokens to 9000"),
        ("max_num_batched_tokens", 1, "is 1; it has to be .*from 16"),
        ("chunked_prefill_tokens", 10_000, "is 10000; it has to be at most 8,192.*on h100-sxm"),
        ("gpu_memory_utilization", 0.0, r"is 0\.0; it has to be .*above 0"),
        ("gpu_memory_utilization", 1.01, r"is 1\.01; it has to be .*at most 1"),
        ("block_size", 24, "is 24; it has to be a multiple of 16.*h100-sxm"),
        ("watermark_fraction", 1.0, r"is 1\.0; it has to be .*0 to 0\.99"),
        ("watermark", 0.1, r"is 0\.1, but there is no such key.*sizing schema"),
    ],
)
def test_settings_that_cannot_be(key: str, value: object, says: str) -> None:
    """The message has the key, the value, what is expected and what to do."""
    with pytest.raises(InputError, match=rf"engine\.{key} .*{says}"):
        inputs(**{key: value})


def test_a_plan_carries_the_settings() -> None:
    """Pools and engine settings of the plan hold what the scenario asks for."""
    asked = {"max_num_seqs": 48, "max_num_batched_tokens": 4096, "chunked_prefill_tokens": 512}
    runs = deployed(gpu_memory_utilization=0.8, block_size=64, **asked)
    assert (runs.engine.gpu_memory_utilization, runs.engine.block_size) == (0.8, 64)
    assert runs.engine.chunked_prefill_tokens == 512
    assert runs.pool("decode").max_num_seqs == 48
    assert {pool.max_num_batched_tokens for pool in runs.pools} == {4096}
    kept = deployed(watermark_fraction=0.05)
    facts = planned_facts(kept, kept.pool("decode"))
    assert kept.engine.watermark_fraction == facts["watermark_fraction"] == 0.05
    assert vllm_arguments(kept, kept.pool("decode"))["watermark"] == 0.05
    assert deployed(chunked_prefill_tokens=8000).engine.chunked_prefill_tokens == 4208


def test_memory_limits_the_batch_below_the_engine() -> None:
    """Without a key the batch is what memory holds beside the working memory of that batch."""
    whole = deployed()
    assert 64 < whole.pool("decode").max_num_seqs < 1024
    half = deployed(gpu_memory_utilization=0.5)
    assert half.pool("decode").max_num_seqs < whole.pool("decode").max_num_seqs
    assert half.pool("decode").kv_bytes < whole.pool("decode").kv_bytes
    # fewer sequences need fewer logits, which leaves more cache
    assert deployed(max_num_seqs=8).pool("decode").kv_bytes >= whole.pool("decode").kv_bytes
