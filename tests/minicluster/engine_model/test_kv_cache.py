"""Bytes of the KV cache by hand, in whole blocks, of every kind of attention; what stays there."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence, kv_bytes_per_token, state_bytes
from minicluster.engine_model.prefix_cache import ConversationCache
from minicluster.specs.slicing import Slicing, stage_layers
from sizing import catalog


def test_kv_bytes_of_llama_70b() -> None:
    """2 x 80 layers x 8 heads x 128 x 2 bytes; one head a rank from TP 8 on (eq. M2)."""
    model = catalog.find_model("llama-3.1-70b")
    assert kv_bytes_per_token(model, tp=1) == 327_680
    assert kv_bytes_per_token(model, tp=8) == 327_680 / 8
    assert kv_bytes_per_token(model, tp=16) == 327_680 / 8
    assert kv_bytes_per_token(model, slicing=Slicing(tp=2, pp=2)) == 327_680 / 4


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


@given(window=st.integers(1, 300), block=st.sampled_from((4, 16)), tokens=st.integers(1, 2000))
def test_a_window_keeps_every_block_that_it_touches(window: int, block: int, tokens: int) -> None:
    """Wherever in a block a window starts its blocks have room, with one to spare (eq. M3)."""
    model = replace(catalog.find_model("llama-3.1-8b"), window_tokens=window, num_window_layers=32)
    one_block = block * 32 * 2 * 8 * 128 * 2
    held = kv_bytes_per_sequence(model, tokens, tp=1, block_size=block) / one_block
    touched = max(
        len({at // block for at in range(max(0, end - window), end)})
        for end in range(max(1, tokens - block), tokens + 1)
    )
    assert touched <= held <= touched + 1


def test_linear_state_does_not_grow() -> None:
    """Qwen3.5 keeps 45 states of 64 x 128 x 128 in fp32 a sequence, and 15 layers of KV cache."""
    model = catalog.find_model("qwen3.5-397b-a17b")
    window = 3 * (2 * 16 * 128 + 64 * 128) * 2
    assert state_bytes(model) == 45 * (64 * 128 * 128 * 4 + window)
    assert state_bytes(model, slicing=Slicing(tp=8)) == state_bytes(model) / 8
    assert kv_bytes_per_token(model) == 15 * 2 * 2 * 256 * 2
    empty, full = (kv_bytes_per_sequence(model, n, block_size=16) for n in (16, 1616))
    assert full - empty == 1600 * kv_bytes_per_token(model)


def test_index_keys_are_cached() -> None:
    """GLM-5 keeps 576 values of latent and an fp8 key of 128 with its scale a token and layer."""
    assert kv_bytes_per_token(catalog.find_model("glm-5")) == 78 * (576 * 2 + 132)


@given(layers=st.integers(1, 200), pp=st.integers(1, 32))
def test_stages_hold_all_layers(layers: int, pp: int) -> None:
    held = stage_layers(layers, pp)
    assert sum(held) == layers
    assert max(held) - min(held) <= 1


def test_a_conversation_that_just_fits_stays() -> None:
    cache = ConversationCache([7, 7], block_size=16)
    cache.free(0, tokens=160, free_blocks=10)
    assert cache.find(1, free_blocks=10) == 160
    cache.free(0, tokens=160, free_blocks=10)
    assert cache.find(1, free_blocks=9) == 0
