"""Degrees that vLLM and NIXL accept, against what their ranks would hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.parallelism import nixl_rule, tp_rule
from sizing import catalog

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "deepseek-v3", "qwen3-0.6b")
DEGREES = st.integers(1, 64)


def heads_of(rank: int, tp: int, kv_heads: int) -> set[int]:
    """Return the KV heads that a rank holds: its slice, or one whole head that others hold too."""
    if tp >= kv_heads:
        return {rank // (tp // kv_heads)}
    return set(range(rank * kv_heads // tp, (rank + 1) * kv_heads // tp))


@given(model=st.sampled_from(MODELS), tp=DEGREES)
def test_a_degree_slices_everything_evenly(model: str, tp: int) -> None:
    """What is accepted leaves no remainder of heads or feed-forward, nor of copies of a KV head."""
    spec = catalog.find_model(model)
    if tp_rule(spec, tp) is None:
        assert spec.num_heads % tp == spec.ffn_size % tp == 0
        assert spec.mla or 0 in {spec.num_kv_heads % tp, tp % spec.num_kv_heads}
    assert tp_rule(spec, 1) is None


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        ("llama-3.1-70b", 3, "TP 2 or 4: the number of attention heads (64)"),
        ("phi-4", 5, "TP 2: vocabulary 100,352 (padded to 64) is not divisible by TP 5"),
        ("llama-3.1-70b", 64, None),
        ("llama-3.1-70b", 16, None),
        ("deepseek-v3", 128, None),
    ],
)
def test_degrees_of_known_models(model: str, tp: int, expected: str | None) -> None:
    """More ranks than KV heads copy them; a latent has none to slice."""
    rule = tp_rule(catalog.find_model(model), tp)
    assert expected is None if rule is None else expected in rule


@given(prefill_tp=DEGREES, decode_tp=DEGREES, kv_heads=st.sampled_from((1, 2, 8, 16)))
def test_a_pair_that_nixl_takes_moves_every_head_once(
    prefill_tp: int, decode_tp: int, kv_heads: int
) -> None:
    model = replace(catalog.find_model("llama-3.1-70b"), num_kv_heads=kv_heads)
    if any(tp_rule(model, tp) for tp in (prefill_tp, decode_tp)):
        return
    rule = nixl_rule(model, prefill_tp=prefill_tp, decode_tp=decode_tp)
    if prefill_tp <= decode_tp:
        assert rule is None  # divisors of 64 nest, and one rank is read
        return
    found = []
    for rank in range(decode_tp):
        read = range(rank * prefill_tp // decode_tp, (rank + 1) * prefill_tp // decode_tp)
        held = [head for each in read for head in heads_of(each, prefill_tp, kv_heads)]
        found.append(sorted(held) == sorted(heads_of(rank, decode_tp, kv_heads)))
    assert (rule is None) == all(found)


@given(prefill_tp=DEGREES, decode_tp=DEGREES)
def test_a_latent_pairs_wherever_degrees_nest(prefill_tp: int, decode_tp: int) -> None:
    """Every rank holds the whole latent; only the ranks have to share out evenly."""
    rule = nixl_rule(catalog.find_model("deepseek-v3"), prefill_tp=prefill_tp, decode_tp=decode_tp)
    wide, narrow = max(prefill_tp, decode_tp), min(prefill_tp, decode_tp)
    assert (rule is None) == (wide % narrow == 0)
