"""Step times and memory with speculative decoding: verification and draft passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from minicluster.engine_model.kv_cache import kv_bytes_per_token, state_bytes
from minicluster.specs.model import DraftSpec, draft_layer
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.memory import kv_space_bytes, weight_bytes
from sizing.latency.op import StepLoad, decode_load, prefill_load
from sizing.latency.step import DRAFT, step_s, step_terms
from sizing.latency.term import Machine
from sizing.latency.work import step_ops

EIGHT = Slicing(tp=8)


def machine(drafts: int, model: str = "deepseek-v3", accepted: float = 0.0) -> Machine:
    gpu = catalog.find_gpu("h200-sxm")
    [engine] = [each for each in catalog.engines() if each.deployable]
    engine = replace(engine, speculative_tokens=drafts, mean_accepted_tokens=accepted)
    return Machine(
        model=catalog.find_model(model, drafts=drafts > 0),
        gpu=gpu,
        cluster=catalog.clusters()["h200-8"],
        engine=engine.on(gpu),
    )


def seconds(drafts: int, load: StepLoad, model: str = "deepseek-v3") -> np.ndarray:
    return step_s(machine(drafts, model), load, slicing=EIGHT)


@pytest.mark.parametrize("model", ["deepseek-v3", "glm-5", "qwen3.5-397b-a17b", "gpt-oss-120b"])
def test_each_draft_makes_a_step_longer_and_less_than_a_step_more(model: str) -> None:
    """Drafts that are never accepted cost; all accepted at batch 1 they gain."""
    for load in (decode_load([1.0, 16.0, 256.0], 4000.0), prefill_load([100.0, 4000.0])):
        found = [seconds(drafts, load, model) for drafts in range(4)]
        assert all((more > less).all() for less, more in pairwise(found))
    alone = decode_load(1.0, 4000.0)
    assert float(seconds(1, alone, model)) < 2 * float(seconds(0, alone, model))


def test_verification_multiplies_every_token_and_reads_weights_and_cache_once() -> None:
    """FLOPs of GEMMs and scores grow by 1 + k; the cache is read once, and dense weights too."""
    model = catalog.find_model("llama-3.1-70b")
    load = decode_load(8.0, 4000.0)
    plain = {op.name: op.total for op in step_ops(model, load, slicing=EIGHT)}
    verified = replace(load, queries=4.0, sampled=4.0)
    for op in step_ops(model, verified, slicing=EIGHT):
        before = plain[op.name]
        assert float(op.total.flops) == pytest.approx(4 * float(before.flops)), op.name
        assert float(op.total.hbm_bytes) <= 4 * float(before.hbm_bytes) + 1e-6, op.name
    attention = {op.name: op for op in step_ops(model, verified, slicing=EIGHT)}["attention decode"]
    cache = 8 * 4000 * kv_bytes_per_token(model, slicing=EIGHT)
    queries = 8 * 4 * 2 * model.num_heads / 8 * model.head_dim * 2 * model.num_layers
    assert float(attention.total.hbm_bytes) == pytest.approx(cache + queries)


def test_the_first_draft_pass_sees_the_step_and_further_ones_a_token_of_each_sequence() -> None:
    """GEMM of the draft head's inputs: F = 2 m (2 h) h, m = B (1 + k) and then k - 1 times B."""
    batch, model = 8, catalog.find_model("deepseek-v3")
    for drafts in (1, 2, 5):
        terms = step_terms(machine(drafts), decode_load(float(batch), 4000.0), slicing=EIGHT)
        [combine] = [term for term in terms if term.name == f"{DRAFT}combine"]
        rows = batch * (1 + drafts) + (drafts - 1) * batch
        assert float(combine.flops) == pytest.approx(rows * 4 * model.hidden_size**2)


def test_terms_of_drafts_add_up_and_are_absent_without() -> None:
    """The sum of the terms is the step; without drafts no term has another name or time."""
    load = decode_load([1.0, 64.0], 4000.0)
    for drafts in (0, 3):
        terms = step_terms(machine(drafts), load, slicing=EIGHT)
        total = np.asarray(sum(term.seconds for term in terms))
        np.testing.assert_allclose(total, seconds(drafts, load))
        assert any(term.name.startswith(DRAFT) for term in terms) == (drafts > 0)


def test_an_engine_that_hides_no_host_work_pays_its_share_of_decode_steps() -> None:
    """SGLang without its overlapped drafts: 28 % of a step that decodes, nothing of a prompt's."""
    base = machine(3)
    slow = replace(base, engine=replace(base.engine, draft_overhead_fraction=0.28))
    for load, factor in ((decode_load(8.0, 4000.0), 1.28), (prefill_load(1000.0), 1.0)):
        hidden, shown = (float(step_s(each, load, slicing=EIGHT)) for each in (base, slow))
        assert shown == pytest.approx(factor * hidden)


def test_the_layer_of_deepseek_v3_has_its_published_size() -> None:
    """11.5 billion parameters of its own, in fp8 (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md)."""
    plain, drafting = (
        weight_bytes(catalog.find_model("deepseek-v3", drafts=drafts), slicing=Slicing())
        for drafts in (False, True)
    )
    assert drafting - plain == pytest.approx(11.5e9, rel=0.02)


def test_a_head_takes_memory_from_the_cache_and_has_a_cache_itself() -> None:
    """One more layer caches every token; a linear state is kept for each draft, with its inputs."""
    one = catalog.find_model("deepseek-v3", drafts=True)
    layers = one.num_layers
    without = replace(one, draft=None)
    each = kv_bytes_per_token(without) / layers
    assert kv_bytes_per_token(one) == pytest.approx(each * (layers + 1))
    linear = catalog.find_model("qwen3.5-397b-a17b")
    inputs = 45 * 3 * (2 * 16 * 128 + 64 * 128) * 2
    assert state_bytes(linear, drafts=3) == pytest.approx(4 * (state_bytes(linear) + inputs))
    left = [
        kv_space_bytes(found.model, found.gpu, found.engine, slicing=EIGHT)
        for found in (machine(0), machine(1), machine(4))
    ]
    assert left == sorted(left, reverse=True)


def test_a_draft_head_of_its_own_is_dense_and_in_16_bits() -> None:
    """The EAGLE-3 head of gpt-oss has 0.4 billion 16-bit parameters; the experts have 4 bits."""
    model = catalog.find_model("gpt-oss-120b", drafts=True)
    assert model.draft is not None
    layer = draft_layer(model)
    assert (layer.moe, layer.weight_dtype, layer.vocab_size) == (None, "bf16", 64_000)
    own = weight_bytes(model, slicing=Slicing())
    own -= weight_bytes(replace(model, draft=None), slicing=Slicing())
    assert own == pytest.approx(2 * 0.4e9, rel=0.1)


def test_mtp_layers_are_read_from_the_config() -> None:
    """One of DeepSeek-V3 and Qwen3.5; none of Llama; only where drafts are asked for."""
    for name in ("deepseek-v3", "deepseek-v3.2", "glm-5", "qwen3.5-397b-a17b"):
        assert catalog.find_model(name, drafts=True).draft == DraftSpec(method="mtp")
        assert catalog.find_model(name).draft is None
    assert catalog.find_model("llama-3.1-8b", drafts=True).draft is None
