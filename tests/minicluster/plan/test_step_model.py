"""A step model whose steps take longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.plan import StepModel
from minicluster.plan.step_time import decode_s, prefill_s
from minicluster.specs.step import Interference
from tests import plans

STEP = replace(
    plans.STEP,
    stream_s=0.002,
    per_sequence_s=1e-3,
    per_pair_s=1e-8,
    per_context_token_s=1e-7,
    experts_s=0.004,
    expert_miss_fraction=0.9,
)
MODEL = StepModel(
    prefill=STEP, decode=STEP, path=plans.PATH, interference=Interference(decode_fraction=0.1)
)
FACTORS = st.floats(0.5, 3)


@given(FACTORS, FACTORS, st.integers(1, 4096))
def test_steps_take_so_many_times_as_long(prefill: float, decode: float, tokens: int) -> None:
    """Prompts in a step of decode grow as decode does, in a mixed step as prefill does."""
    apart, mixed = (MODEL.slowed(prefill=prefill, decode=decode, mixed=m) for m in (False, True))
    for slow, prompts in ((apart, decode), (mixed, prefill)):
        assert prefill_s(slow.prefill, tokens) == pytest.approx(prefill * prefill_s(STEP, tokens))
        assert decode_s(slow.decode, 8, tokens) == pytest.approx(decode * decode_s(STEP, 8, tokens))
        assert slow.decode.per_prefill_token_s == pytest.approx(prompts * STEP.per_prefill_token_s)
        assert slow.decode.per_pair_s == pytest.approx(prompts * STEP.per_pair_s)
        assert (slow.path, slow.interference) == (MODEL.path, MODEL.interference)
    assert MODEL.slowed(prefill=1, decode=1, mixed=True) == MODEL
