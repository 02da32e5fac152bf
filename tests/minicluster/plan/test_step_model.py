"""A step model whose steps take longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.plan import StepModel
from minicluster.plan.step_time import decode_s, prefill_s
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients

STEP = StepCoefficients(
    base_s=0.01,
    stream_s=0.002,
    per_prefill_token_s=1e-4,
    per_sequence_s=1e-3,
    per_pair_s=1e-8,
    per_context_token_s=1e-7,
    max_tokens=4096,
    max_batch=64,
    max_context_tokens=8192,
    error_fraction=0.0,
    experts_s=0.004,
    expert_miss_fraction=0.9,
)
MODEL = StepModel(
    prefill=STEP,
    decode=STEP,
    path=PathCoefficients(
        request_s=0.001, transfer_base_s=0.002, transfer_per_token_s=1e-6, error_fraction=0.0
    ),
    interference=Interference(decode_fraction=0.1),
)
FACTORS = st.floats(0.5, 3)
TOKENS = st.integers(1, 4096)


@given(FACTORS, FACTORS, TOKENS, st.booleans())
def test_steps_take_so_many_times_as_long(
    prefill: float,
    decode: float,
    tokens: int,
    mixed: bool,  # noqa: FBT001
) -> None:
    slow = MODEL.slowed(prefill=prefill, decode=decode, mixed=mixed)
    assert prefill_s(slow.prefill, tokens) == pytest.approx(prefill * prefill_s(STEP, tokens))
    assert decode_s(slow.decode, 8, tokens) == pytest.approx(decode * decode_s(STEP, 8, tokens))
    assert (slow.path, slow.interference) == (MODEL.path, MODEL.interference)


@given(FACTORS, FACTORS)
def test_prompts_in_a_mixed_step_grow_as_prefill_does(prefill: float, decode: float) -> None:
    apart = MODEL.slowed(prefill=prefill, decode=decode, mixed=False).decode
    mixed = MODEL.slowed(prefill=prefill, decode=decode, mixed=True).decode
    assert mixed.per_prefill_token_s == pytest.approx(prefill * STEP.per_prefill_token_s)
    assert mixed.per_pair_s == pytest.approx(prefill * STEP.per_pair_s)
    assert apart.per_prefill_token_s == pytest.approx(decode * STEP.per_prefill_token_s)
    assert (mixed.base_s, mixed.per_sequence_s) == (apart.base_s, apart.per_sequence_s)
    assert MODEL.slowed(prefill=1, decode=1, mixed=True) == MODEL
