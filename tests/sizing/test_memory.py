"""Bytes on one GPU: conservation under slicing, and vLLM's own accounting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizing import catalog
from sizing.latency.memory import (
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    kv_space_bytes,
    weight_bytes,
)
from sizing.specs.parameters import weight_bytes as all_weight_bytes

GIB = 2**30
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b")


@given(model=st.sampled_from(MODELS), tp=st.sampled_from((1, 2, 4, 8, 16, 32)))
def test_slicing_loses_no_byte(model: str, tp: int) -> None:
    """All ranks together hold at least what one GPU holds, weights and KV cache."""
    spec = catalog.find_model(model)
    assert tp * weight_bytes(spec, tp=tp) >= all_weight_bytes(spec) * (1 - 1e-9)
    assert tp * kv_bytes_per_token(spec, tp=tp) >= kv_bytes_per_token(spec, tp=1) * (1 - 1e-9)
    assert weight_bytes(spec, tp=1) == pytest.approx(all_weight_bytes(spec))


def test_kv_bytes_of_llama_70b() -> None:
    """2 x 80 layers x 8 heads x 128 x 2 bytes; one head a rank from TP 8 on (eq. M2)."""
    model = catalog.find_model("llama-3.1-70b")
    assert kv_bytes_per_token(model, tp=1) == 327_680
    assert kv_bytes_per_token(model, tp=8) == 327_680 / 8
    assert kv_bytes_per_token(model, tp=16) == 327_680 / 8


def test_latent_attention_is_not_sliced() -> None:
    """DeepSeek-V3 keeps 512 + 64 values a token and layer, on every rank."""
    model = catalog.find_model("deepseek-v3")
    assert kv_bytes_per_token(model, tp=1) == 61 * 576 * 2
    assert kv_bytes_per_token(model, tp=8) == kv_bytes_per_token(model, tp=1)


@given(tokens=st.integers(1, 10_000), block=st.sampled_from((16, 32)))
def test_sequences_take_whole_blocks(tokens: int, block: int) -> None:
    """A sequence takes the blocks it touches, at most one block more than its tokens (eq. M3)."""
    model = catalog.find_model("llama-3.1-8b")
    taken = kv_bytes_per_sequence(model, tokens, tp=1, block_size=block)
    per_token = kv_bytes_per_token(model, tp=1)
    assert tokens * per_token <= taken < (tokens + block) * per_token
    assert taken % (block * per_token) == 0


def test_windowed_layers_stop_growing() -> None:
    """Beyond its window a windowed layer keeps no more (eq. M3)."""
    model = replace(catalog.find_model("llama-3.1-8b"), window_tokens=128, num_window_layers=16)
    short, longer, longest = (
        kv_bytes_per_sequence(model, tokens, tp=1, block_size=16) for tokens in (4096, 8192, 12288)
    )
    full = 16 * 4096 * 2 * 8 * 128 * 2
    assert longer - short == pytest.approx(full)
    assert longest - longer == pytest.approx(full)


@pytest.mark.parametrize(
    ("name", "dtype", "tp", "weights_gib", "kv_gib"),
    [
        ("llama-3.1-8b", "bf16", 1, 14.99, 51.38),
        ("llama-3.3-70b", "fp8", 2, 33.88, 32.0),
        ("qwen3-32b", "bf16", 1, 61.03, 4.45),
        ("qwen3-32b", "bf16", 2, 30.59, 34.49),
    ],
)
def test_against_vllm_on_h100(
    name: str, dtype: str, tp: int, weights_gib: float, kv_gib: float
) -> None:
    """
    Weights within 1 %, KV space within 2.5 GiB of vLLM's own accounting on an 80 GB H100.

    Source: llm-d-planner docs/empirical-vllm-memory-results.md (Apache-2.0), read 2026-11-20;
    vLLM's version and batch limits are not recorded. Our activations and runtime are the
    largest of that table, so that the KV space comes out smaller, never larger.
    """
    model = replace(catalog.find_model(name), weight_dtype=dtype)
    gpu, engine = catalog.find_gpu("h100-sxm"), replace(catalog.engines()[0], memory_fraction=0.9)
    assert weight_bytes(model, tp=tp) / GIB == pytest.approx(weights_gib, rel=0.01)
    predicted = kv_space_bytes(model, gpu, engine, tp=tp) / GIB
    assert kv_gib - 2.5 < predicted < kv_gib + 0.5
