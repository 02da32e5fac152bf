"""Bytes of LoRA adapters, their slots, and their kernels in a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.specs.lora import LoraSpec, adapter_bytes, lora_modules
from minicluster.specs.scenario import EngineChoice
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.memory import kv_space_bytes
from sizing.latency.op import decode_load, prefill_load
from sizing.latency.step import step_s, step_terms
from sizing.latency.term import Machine
from sizing.latency.work import distinct_adapters, lora_ops
from tests.sizing.scenarios import inputs

MODEL = catalog.find_model("llama-3.1-8b")
LORA = LoraSpec(max_loras=4, max_lora_rank=16, max_cpu_loras=8, adapters=8)


def machine(lora: LoraSpec | None) -> Machine:
    """Return the 8B model on an H100 with these adapters."""
    found = Machine.of(inputs())
    return replace(found, engine=replace(found.engine, lora=lora))


def test_an_adapter_of_all_linear_layers_by_hand() -> None:
    """
    Of Llama-3.1-8B at rank 16: r (n + m) of each projection, 41.9 million values in 32 layers.

    Of Llama-2-7b at rank 64 in 32 bits 640 MB: the file of that size of
    `xtuner/Llama-2-7b-qlora-moss-003-sft` (github.com/vllm-project/vllm/issues/10062; its rank and
    layers from memory, not read again).
    """
    h, keys, f = 4096, 1024, 14336
    each = 4 * h + 2 * (h + keys) + 3 * (h + f)
    assert adapter_bytes(LORA, MODEL, tp=1, layers=32) == 2 * 16 * 32 * each == 2 * 41_943_040
    llama = catalog.find_model("llama-2-7b")
    values = adapter_bytes(replace(LORA, max_lora_rank=64), llama, tp=1, layers=32) / 2
    assert 4 * values == pytest.approx(640e6, rel=0.01)


@given(tp=st.sampled_from([1, 2, 4, 8]), rank=st.sampled_from([8, 16, 64]))
def test_what_slicing_leaves_whole(tp: int, rank: int) -> None:
    """A of layers sliced by columns and B of layers sliced by rows are on every GPU."""
    lora = replace(LORA, max_lora_rank=rank)
    whole = sum(
        each.parts * each.inner if each.name in {"qkv", "gate up"} else each.columns
        for each in lora_modules(lora, MODEL, tp=1)
    )
    one, sliced = (adapter_bytes(lora, MODEL, tp=n, layers=1) / (2 * rank) for n in (1, tp))
    assert sliced == pytest.approx(whole + (one - whole) / tp)


@given(slots=st.integers(1, 8), tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]))
def test_slots_take_their_bytes_from_the_kv_cache(slots: int, tp: int, pp: int) -> None:
    """As many adapters of the longest stage as there are slots."""
    lora, slicing = replace(LORA, max_loras=slots), Slicing(tp=tp, pp=pp)
    without, with_slots = (
        kv_space_bytes(m.model, m.gpu, m.engine, slicing=slicing)
        for m in (machine(None), machine(lora))
    )
    expected = slots * adapter_bytes(lora, MODEL, tp=tp, layers=32 // pp)
    assert without - with_slots == pytest.approx(expected)


@given(requests=st.floats(1, 500), exponent=st.sampled_from([0.0, 0.8, 2.0]))
def test_distinct_adapters_of_a_batch(requests: float, exponent: float) -> None:
    """No more than requests, slots or adapters; of all alike by the occupancy of urns."""
    lora = replace(LORA, popularity_exponent=exponent)
    free = replace(lora, max_loras=8)
    found, unbounded = (float(distinct_adapters(x, np.array(requests))) for x in (lora, free))
    assert 0 < found <= min(requests, 4) + 1e-9
    assert found == min(4, unbounded)
    if not exponent:
        assert unbounded == pytest.approx(8 * (1 - (7 / 8) ** requests))


def test_the_kernels_of_a_decode_step_by_hand() -> None:
    """Two for each of four modules in 32 layers; one request reads one adapter at most."""
    ops = lora_ops(LORA, MODEL, decode_load(1, 100), tp=1)
    assert [op.repeats for op in ops] == [32] * 8
    read = sum(float(op.total.hbm_bytes) for op in ops)
    flops = sum(float(op.total.flops) for op in ops)
    size = adapter_bytes(LORA, MODEL, tp=1, layers=32)
    assert flops == pytest.approx(size)  # 2 FLOPs a value of 2 bytes
    buffers = 32 * 7 * 16 * 4 * 2
    tokens = 32 * 2 * (3 * 4096 + 14336 + 2 * (6144 + 4096 + 28672 + 4096))
    assert read == pytest.approx(size + buffers + tokens)
    assert lora_ops(None, MODEL, decode_load(1, 100), tp=1) == ()


@given(batch=st.integers(1, 200), tp=st.sampled_from([1, 2, 4]))
def test_adapters_make_steps_longer_by_their_terms(batch: int, tp: int) -> None:
    """More so with a higher rank; without adapters nothing changes."""
    slicing = Slicing(tp=tp)
    for load in (decode_load(batch, 1000), prefill_load(50 * batch)):
        seconds = [
            float(step_s(machine(lora), load, slicing=slicing))
            for lora in (None, LORA, replace(LORA, max_lora_rank=64))
        ]
        assert seconds == sorted(seconds)
        added = sum(
            float(term.seconds)
            for term in step_terms(machine(LORA), load, slicing=slicing)
            if term.name.startswith("LoRA")
        )
        assert seconds[1] - seconds[0] == pytest.approx(added)
    assert catalog.find_engine(EngineChoice()).lora is None
