"""Predictions of rows: engines, memory, split pools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minicluster.errors import InputError
from sizing import catalog
from sizing.evidence.prediction import predict_row
from sizing.evidence.row_config import nearest_engine, row_config
from sizing.evidence.row_system import row_inputs, row_system
from sizing.latency.op import decode_load, prefill_load
from sizing.latency.step import step_s, step_terms
from sizing.planner.configuration import Configuration
from sizing.planner.deployment import deployment
from sizing.planner.layout import Layout, LayoutShape
from sizing.planner.step_models import StepModels
from sizing.simulation.planned import deployed_system
from tests.sizing.evidence.rows import SPLIT, row


def test_one_user_waits_for_nobody() -> None:
    """TPOT of a single stream is that of its own steps."""
    one = row(concurrency="1")
    config, slicing = row_config(one), one.groups[0].slicing
    step = step_s(config.machine, decode_load(1, 1024 + 128), slicing=slicing)
    assert predict_row(one).tpot_s == pytest.approx(float(step), rel=0.03)


def test_a_version_that_prepares_no_step_ahead_has_slower_steps() -> None:
    """By what its host does between two steps, which grows with the sequences (eq. S5)."""
    slower = []
    for users in ("1", "64"):
        old, new = (predict_row(row(engine_version=v, concurrency=users)) for v in ("0.13", "0.14"))
        slower.append(old.tpot_s - new.tpot_s)
    engine = row_config(row()).machine.engine
    assert slower[0] == pytest.approx(engine.exposed_step_s, rel=0.1)
    assert slower[1] > engine.exposed_step_s + 32 * engine.exposed_sequence_s


@pytest.mark.parametrize(
    ("cells", "compiles"),
    [
        ({}, True),
        ({"length_jitter": ""}, False),  # the number of tokens is met again
        ({"engine_version": "0.5.16"}, False),
        ({"engine_version": "nightly-dev-20260216"}, True),
        ({"model": "deepseek-ai/DeepSeek-V3"}, False),
        ({"engine": "vllm", "engine_version": "0.18"}, False),
    ],
)
def test_prompts_of_gated_delta_layers_are_compiled(
    cells: dict[str, str], *, compiles: bool
) -> None:
    """By SGLang before 0.5.16, for each number of tokens in a step (eq. S5)."""
    qwen = {"model": "Qwen/Qwen3.5-397B-A17B", "gpu": "b200-sxm", "length_jitter": "0.2"}
    one = row(**qwen | {"engine": "sglang", "engine_version": "0.5.9"} | cells)
    machine, slicing = row_config(one).machine, one.groups[0].slicing
    prompt, decode = (
        sum(
            float(t.seconds)
            for t in step_terms(machine, load, slicing=slicing)
            if "compile" in t.name
        )
        for load in (prefill_load(922), decode_load(4, 1024))
    )
    assert (prompt, decode) == (0.09 if compiles else 0.0, 0.0)


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_more_users_wait_longer(engine: str) -> None:
    """TTFT and TPOT grow with concurrency, whatever the scheduler."""
    found = [predict_row(row(engine=engine, concurrency=f"{c}")) for c in (1, 8, 64, 256)]
    for name in ("ttft_s", "tpot_s"):
        values = [getattr(each, name) for each in found]
        assert values == sorted(values), name


def test_a_rate_at_the_edge_of_capacity_is_served() -> None:
    """Between a rate that is served and one far too high some are served by faster steps (V6)."""
    found = [predict_row(row(load="open", requests_per_s=f"{rate}")) for rate in (10, 26, 100)]
    edge = ["edge of capacity" in each.reason for each in found]
    assert (edge[0], edge[-1], any(edge)) == (False, False, True)
    statuses = [each.status for each in found]
    assert statuses == sorted(statuses, reverse=True)


def test_split_pools_have_a_ttft_and_a_tpot() -> None:
    """More decode replicas lower TPOT; the first wave of many users waits for prefill."""
    two = predict_row(row(**SPLIT))
    four = predict_row(row(**SPLIT | {"gpus": "40", "decode_replicas": "4"}))
    crowd = predict_row(row(**SPLIT | {"concurrency": "512"}))
    for each in (two, four, crowd):
        assert each.status == "predicted", each.reason
    assert (four.tpot_s or 0) < (two.tpot_s or 0) < (crowd.tpot_s or 0)
    assert (crowd.ttft_s or 0) > (two.ttft_s or 0)


def test_prefill_waits_until_decode_has_seen_the_request() -> None:
    """On SGLang, whose decode pool looks at new requests every ten steps by its recipe (eq. V4)."""
    cells = SPLIT | {
        "source": "inferencex", "engine": "sglang", "model": "deepseek-ai/DeepSeek-R1",
        "gpu": "gb200", "weight_dtype": "fp8", "gpus": "8", "prefill_tp": "4",
        "decode_replicas": "1", "decode_tp": "4", "osl": "1024", "length_jitter": "0.2",
    }  # fmt: skip
    known, other = (row(**cells | {"concurrency": users}) for users in ("4", "5"))
    waits = [row_system(each, row_config(each)).path.request_s for each in (known, other)]
    step = step_s(
        row_config(known).machine, decode_load(4, 0.9 * 1536), slicing=known.groups[1].slicing
    )
    assert waits[0] - waits[1] == pytest.approx(5 * float(step), rel=0.01)


def test_the_nearest_version_of_an_engine_stands_in() -> None:
    """Its own version: no note; a nearer one before a newer one; another engine is refused."""
    base = catalog.engines()[0]
    known = [
        replace(base, name=name, version=version)
        for name, version in (
            ("vllm", "0.9.1"),
            ("vllm", "0.18.0"),
            ("vllm", "1.2.0"),
            ("trtllm", "1.0.0"),
        )
    ]
    asked = {
        ("vllm", "0.18"): ("vllm", "0.18.0", False),
        ("vllm", "0.16.2"): ("vllm", "0.18.0", True),
        ("vllm", "0.10"): ("vllm", "0.9.1", True),
        ("vllm", "1.18"): ("vllm", "1.2.0", True),
        ("vllm", ""): ("vllm", "1.2.0", True),
        ("vllm", "nightly"): ("vllm", "1.2.0", True),
    }
    for (name, version), (own, nearest, noted) in asked.items():
        profile, notes = nearest_engine(name, version, known)
        assert (profile.name, profile.version, bool(notes)) == (own, nearest, noted)
    with pytest.raises(InputError, match="'sglang'; it has to be one of vllm, trtllm"):
        nearest_engine("sglang", "0.5.9", known)


def test_the_version_of_a_server_is_not_that_of_its_engine() -> None:
    """No TensorRT-LLM below 1.0 serves split pools: such a version is Dynamo's."""
    for version, expected in (("0.8.1.post3", "1.0.0"), ("1.1.0", "1.0.0")):
        one = row(**(SPLIT | {"engine": "trtllm", "engine_version": version}))
        assert row_config(one).machine.engine.version == expected
    alone = row(engine="trtllm", engine_version="0.8.1")
    assert row_config(alone).machine.engine.version == "0.9.0"


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            {"engine": "trtllm", "gpu": "a100-sxm"},
            "weight_dtype is 'fp8'; it has to be one of bf16",
        ),
        ({"engine": "trtllm", "weight_dtype": "fp4"}, "weight_dtype is 'fp4'"),
        ({"tp": "6", "gpus": "6"}, "tp is 6; it has to be a width that the 64 attention heads"),
        ({"ep": "8"}, "ep is 8; it has to be a width that the 1 experts"),
        ({"engine": "lightllm"}, "engine is 'lightllm'; it has to be one of"),
        ({"model": "acme/nothing"}, "model is 'acme/nothing'; it has to be a name or hub id"),
        (
            {"kv_dtype": "int4"},
            "kv_dtype is 'int4'; it has to be one of fp32, bf16, fp16, int8, fp8",
        ),
        ({"kv_dtype": "fp4"}, "kv_dtype is 'fp4'; it has to be one of"),
        ({"kv_dtype": "fp8", "gpu": "a100-sxm"}, None),
        (
            {"kv_dtype": "fp8", "gpu": "a100-sxm", "engine": "trtllm", "weight_dtype": "bf16"},
            "kv_dtype is 'fp8'; it has to be one of fp32, bf16, fp16, int8 on a100-sxm",
        ),
        ({"engine": "trtllm", "weight_dtype": "fp4", "model": "openai/gpt-oss-120b"}, None),
    ],
)
def test_what_cannot_run_is_refused_by_name(cells: dict[str, str], said: str | None) -> None:
    """TensorRT-LLM needs the GPU's own units but for MXFP4; vLLM widens the weights instead."""
    one = row(**cells)
    if said is None:
        row_config(one)
    else:
        assert said in predict_row(one).reason
        assert predict_row(one).status == "unsupported"


def test_a_load_that_never_ends_is_infeasible() -> None:
    """Answers longer than the KV cache preempt one another for ever; the row says so."""
    found = predict_row(row(osl="2097152"))
    assert found.status == "infeasible"
    assert "more KV cache" in found.reason


@pytest.mark.parametrize(
    ("model", "engine", "dtype"),
    [
        ("meta-llama/Llama-3.1-70B", "vllm", "fp8"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "vllm", "fp8"),
        ("Qwen/Qwen3-235B-A22B-FP8", "vllm", "bf16"),
        ("Qwen/Qwen3-235B-A22B-FP8", "trtllm", "fp8"),
        ("zhipuai/GLM-5", "sglang", "bf16"),
    ],
)
def test_the_default_kv_dtype_is_the_checkpoints(model: str, engine: str, dtype: str) -> None:
    """Only checkpoints with scales for it have an fp8 cache, or where the engine does it itself."""
    assert row_config(row(model=model, engine=engine)).machine.model.kv_dtype == dtype
    assert row_config(row(model=model, kv_dtype="bf16")).machine.model.kv_dtype == "bf16"


def test_a_row_is_deployed_as_a_plan_is() -> None:
    """Its pool and steps are those of a plan's configuration, but for the rules of its engine."""
    one = row(concurrency="64", max_num_seqs="64")
    inputs = row_inputs(one, row_config(one))
    layout = Layout(
        prefill=None, decode=LayoutShape(slicing=one.groups[0].slicing, gpu=inputs.gpu.name)
    )
    chosen = Configuration(layout=layout, replicas={"mixed": 1}, max_batch={"mixed": 64})
    model = StepModels(inputs, sequences=64).of(layout)
    planned = deployed_system(deployment(inputs, chosen), model)
    measured = row_system(one, row_config(one))
    rules = replace(planned.decode.limits.rules, scheduled_ahead=True)
    assert measured.decode.limits == replace(planned.decode.limits, rules=rules)
    assert measured.path == planned.path
    for tokens, batch in ((0, 8), (1024, 16), (3000, 0)):
        prompts = [(tokens, 0)] if tokens else []
        assert measured.decode.step.step_s(prompts, batch, 1200 * batch) == pytest.approx(
            planned.decode.step.step_s(prompts, batch, 1200 * batch)
        )
