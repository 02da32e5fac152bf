"""Seconds of ops, collectives and steps: closed forms, properties of any constants, tables."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.specs.efficiency import EngineKernels, GemmEfficiency, StreamEfficiency
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.collectives import exchange_s, kv_pull_s_per_byte
from sizing.latency.communication import PATTERNS, Exchange
from sizing.latency.op import Op, StepLoad, Work, decode_load, gemm, prefill_load
from sizing.latency.roofline import multiply_dtype, op_time, smooth_max
from sizing.latency.step import interval_s, stage_s, step_s, step_table, step_terms
from sizing.latency.term import Machine

PUBLISHED = Path(__file__).parents[2] / "published" / "static_prefill.toml"
GPUS = [name for name, entry in catalog.gpus().items() if entry.spec.kind == "gpu"]
MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b",
)  # fmt: skip
TP8 = Slicing(tp=8)


def machine(model: str = "llama-3.1-70b", gpu: str = "h100-sxm") -> Machine:
    """Return a model on nodes of 8 of a GPU, under the first engine of the catalog."""
    spec = catalog.find_gpu(gpu)
    cluster = replace(
        next(iter(catalog.clusters().values())),
        gpu=spec.name,
        gpus_per_node=8,
        gpus_per_hb_domain=8,
        scale_out_latency_s=6e-6,
        scale_out_bytes_per_s=spec.scale_out_bytes_per_s or 50e9,
    )
    return Machine(
        model=catalog.find_model(model), gpu=spec, cluster=cluster, engine=catalog.engines()[0]
    )


@pytest.mark.parametrize("gpu", GPUS)
def test_more_work_is_never_faster(gpu: str) -> None:
    """Times rise with prompt, batch, context and bytes, inside a node and across nodes."""
    here = machine("llama-3.1-8b", gpu)
    growing = np.unique(np.rint(np.geomspace(1, 20_000, 200)))
    for load in (
        prefill_load(growing),
        decode_load(growing[growing <= 2048], 1000),
        decode_load(16, growing),
    ):
        assert np.all(np.diff(step_s(here, load, slicing=Slicing())) >= -1e-12)
    sizes = np.geomspace(1, 1e10, 300)
    for pattern, group in product(PATTERNS, (2, 3, 8, 16, 32)):
        sent = Exchange(pattern, "N1", pattern, group, 1, sizes)
        seconds = exchange_s(sent, here.gpu, here.cluster)
        assert np.all(np.diff(seconds) >= -1e-15), (pattern, group)
        assert np.all(seconds > 0)
        assert exchange_s(replace(sent, size_bytes=0.0), here.gpu, here.cluster) == 0


def test_a_gemm_by_hand() -> None:
    """Weights stream beside the compute, activations apart, the launch on top (R2)."""
    gpu = catalog.find_gpu("h100-sxm")
    plain = GemmEfficiency(compute_fraction=0.5, memory_fraction=0.8, latency_s=1e-6)
    kernels = replace(gpu.efficiency, gemm={"bf16": plain}, sustained_fraction={})
    op = gemm("x", "W1", rows=np.array([8.0, 8192.0]), inner=512, columns=1024, dtype="bf16",
              repeats=2)  # fmt: skip
    compute_s = 2 * op.rows * 512 * 1024 / (989e12 * 0.5)
    weights_s, activations_s = 512 * 1024 * 2 / (3.35e12 * 0.8), op.rows * 1536 * 2 / 3.35e12
    expected = np.maximum(compute_s, weights_s) + activations_s + 1e-6
    assert op_time(op, gpu, kernels).seconds == pytest.approx(2 * expected)


def test_attention_by_hand() -> None:
    """Prefill attention of one head dimension (R3), decode attention over a cache (R5)."""
    gpu = catalog.find_gpu("h100-sxm")
    first, later = gpu.efficiency.prefill_attention, gpu.efficiency.decode_attention
    peak, hbm, keys = gpu.peak_flops_per_s["bf16"], gpu.require("hbm_bytes_per_s"), 4096.0
    work = Work(np.array(1e12), np.array(1e8))
    sizes = {"rows": np.array(32.0), "keys": np.array(keys), "heads": 8.0, "head_dim": 64.0}
    prefill = Op("x", "W3", "prefill attention", "bf16", 3, work, **sizes)
    compute = 1e12 / (peak * first.compute_fraction) * (1 + first.half_tokens / keys)
    compute *= 2**first.head_exponent
    bounds = (compute, 0.0, first.key_latency_s * keys / 2)
    joined = float(smooth_max(*map(np.asarray, bounds), smoothness=first.smoothness))
    exposed = 1e8 / (hbm * first.memory_fraction) + first.latency_s
    assert op_time(prefill, gpu).seconds == pytest.approx(3 * (joined + exposed))
    decode = replace(prefill, kind="decode attention")
    bounds = (1e12 / (peak * later.compute_fraction), 1e8 / (hbm * later.memory_fraction),
              later.key_latency_s * keys)  # fmt: skip
    joined = float(smooth_max(*map(np.asarray, bounds), smoothness=later.smoothness))
    fixed = later.latency_s + later.item_latency_s * 32 * 8
    assert op_time(decode, gpu).seconds == pytest.approx(3 * (joined + fixed))
    state = StreamEfficiency(memory_fraction=0.5, latency_s=1e-6, row_latency_s=1e-6)
    recurrent = replace(gpu.efficiency, linear_attention=state)
    seconds = op_time(replace(prefill, kind="linear attention"), gpu, recurrent).seconds
    assert seconds == pytest.approx(3 * (max(1e12 / peak, 1e8 / (hbm * 0.5)) + 33e-6))


def test_the_kernels_of_a_version_go_over_those_of_its_engine() -> None:
    """Both go over what all engines share; what neither names stays as it is."""
    shared = catalog.find_gpu("h100-sxm").efficiency
    one, two = (replace(shared.prefill_attention, latency_s=n * 1e-3) for n in (1, 2))
    gpu = replace(shared, engines={"mine": EngineKernels(prefill_attention=one)})
    assert gpu.of_engine("mine").prefill_attention == one
    own = gpu.of_engine("mine", EngineKernels(prefill_attention=two))
    assert own == replace(gpu, prefill_attention=two)
    assert gpu.of_engine("other") == gpu


def test_a_send_inside_a_node_needs_no_network() -> None:
    """A cluster whose hop has no known latency is refused where a stage lies in another node."""
    here, sent = machine(), Exchange("send", "X4", "point-to-point", 2, 1, 1e9, 4)
    unknown = replace(here.cluster, scale_out_latency_s=None)
    inside = exchange_s(sent, here.gpu, unknown)
    assert inside == exchange_s(sent, here.gpu, here.cluster) > 0
    with pytest.raises(InputError, match="scale_out_latency_s"):
        exchange_s(replace(sent, stride=8), here.gpu, unknown)


def test_weight_only_quantisation_computes_in_bf16() -> None:
    """Weights multiply in their own dtype only where GPU and fit have it; fp32 is refused."""
    hopper, ampere = catalog.find_gpu("h100-sxm"), catalog.find_gpu("a100-sxm")
    assert multiply_dtype("fp8", hopper) == "fp8"
    assert multiply_dtype("fp8", ampere) == multiply_dtype("int4", hopper) == "bf16"
    with pytest.raises(InputError, match="fp32"):
        multiply_dtype("fp32", hopper)


def test_kv_pull_uses_the_narrower_side() -> None:
    """A prefill GPU that several decode GPUs read from sends to them one after the other (N4)."""
    gpu, cluster = machine().gpu, machine().cluster
    equal = kv_pull_s_per_byte(4, 4, gpu, cluster)
    assert equal == pytest.approx(1 / (50e9 * 0.92))
    assert kv_pull_s_per_byte(2, 8, gpu, cluster) == pytest.approx(4 * equal)
    assert kv_pull_s_per_byte(8, 4, gpu, cluster) == pytest.approx(equal)


def test_terms_add_up_to_the_step() -> None:
    """The terms of a step are the step (eq. S5)."""
    load = decode_load(64, 4000)
    terms = step_terms(machine(), load, slicing=TP8)
    whole = float(step_s(machine(), load, slicing=TP8))
    assert sum(float(term.seconds) for term in terms) == pytest.approx(whole)
    assert len({term.name for term in terms}) == len(terms)


def test_a_pipeline_hands_over_and_keeps_its_stages_busy() -> None:
    """Stages add sends to a step; a full pipeline makes one every stage, the slowest (eq. S6)."""
    here, load = machine(), decode_load(64, 2000)
    one, two = Slicing(tp=4), Slicing(tp=4, pp=2)
    flat, piped = (float(step_s(here, load, slicing=slicing)) for slicing in (one, two))
    assert flat < piped < 1.1 * flat
    assert "stage send" in {term.name for term in step_terms(here, load, slicing=two)}
    assert 0.5 * flat < float(stage_s(here, load, slicing=two)) < 0.65 * flat
    assert float(stage_s(here, load, slicing=one)) == flat
    uneven = Slicing(tp=4, pp=3)  # of 80 layers, two stages have one more
    alone = float(interval_s(here, load, slicing=uneven, batches=1))
    full = float(interval_s(here, load, slicing=uneven, batches=3))
    assert alone == float(step_s(here, load, slicing=uneven)) < full
    assert full == 3 * float(stage_s(here, load, slicing=uneven))


def test_small_steps_with_prompts_are_captured() -> None:
    """VLLM's experts cost their launches only in steps of more tokens than its graphs hold."""
    engine = next(each for each in catalog.engines() if each.captured_tokens)
    one = replace(machine("deepseek-v3", "h200-sxm"), engine=engine)
    most, seconds = engine.captured_tokens, []
    for tokens in (most, most + 1):
        terms = step_terms(one, prefill_load(tokens), slicing=TP8)
        seconds += [float(t.seconds) for t in terms if t.name == "engine per expert layer"]
    layers = one.model.num_layers - one.model.num_dense_layers
    assert seconds == pytest.approx([0.0, engine.prompt_expert_layer_s * layers])


def test_published_first_token_times() -> None:
    engine = next(e for e in catalog.engines() if (e.name, e.version) == ("trtllm", "0.9.0"))
    errors = []
    for row in tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]:
        here = replace(machine(row["model"], row["gpu"]), engine=engine)
        here = replace(here, model=replace(here.model, weight_dtype=row["weight_dtype"]))
        load, slicing = prefill_load(row["input_tokens"]), Slicing(tp=row["tp"])
        errors.append(float(step_s(here, load, slicing=slicing)) / row["ttft_s"] - 1)
    assert np.mean(np.abs(errors)) < 0.11
    assert np.max(np.abs(errors)) < 0.35


@pytest.mark.parametrize("model", MODELS)
def test_the_table_is_the_step_model(model: str) -> None:
    """Between grid points, for chunks, prompts, batches and contexts, it is within 4 % of it."""
    one, each = machine(model), 900
    most, contexts = (8192, 256), (2000.0, 6000.0)
    of = {"prompt_tokens": each, "batches": 1}
    spec = step_table(one, TP8, most=most, contexts=contexts, **of)
    alike = step_table(one, TP8, most=(8192, 8), contexts=(2000.0, 2000.0), **of)
    assert min(alike.per_context_token_s) > 0
    table = PlannedStep(spec)
    for n, p, b, s in product((0, 37, 900, 5400), (0, 3000), (0, 5, 77, 200), (2000, 3500, 6000)):
        if n or b:
            load = StepLoad(
                prompts=np.array(max(1.0, n / each) if n else 0.0),
                prompt_tokens=np.array(float(min(n, each))),
                cached_tokens=np.array(float(p)),
                sequences=np.array(float(b)),
                context_tokens=np.array(float(s)),
            )
            chunks = [(min(n, each), p)] * max(1, n // each) if n else []
            exact = float(step_s(one, load, slicing=TP8))
            assert table.step_s(chunks, b, b * s) == pytest.approx(exact, rel=0.04), (n, p, b, s)
