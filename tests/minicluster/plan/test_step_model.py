"""The step times of a plan, and steps that take longer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.plan import StepModel
from minicluster.plan.step_time import decode_s, prefill_s
from minicluster.specs.step import Interference, StepSpec
from tests import plans

FITTED = replace(
    plans.STEP,
    stream_s=0.002,
    per_sequence_s=1e-3,
    per_pair_s=1e-8,
    per_context_token_s=1e-7,
    knee_tokens=(48, 224),
    knee_per_token_s=(1e-5, 2e-5),
)
STEPS = pytest.mark.parametrize("step", [FITTED, plans.TABLE], ids=["fitted", "table"])
FACTORS = st.floats(0.5, 3)
LOADS = st.tuples(st.integers(1, 400), st.integers(0, 8), st.integers(0, 4096))


def model(step: StepSpec) -> StepModel:
    """Return pools that both take this step."""
    between = Interference(decode_fraction=0.1)
    return StepModel(prefill=step, decode=step, path=plans.PATH, interference=between)


@STEPS
@given(prefill=FACTORS, decode=FACTORS, load=LOADS)
def test_steps_take_so_many_times_as_long(
    step: StepSpec, prefill: float, decode: float, load: tuple[int, int, int]
) -> None:
    """Prompts in a step of decode grow as decode does, in a mixed step as prefill does."""
    tokens, batch, context = load
    whole, pairs = model(step), tokens * (tokens + 1) / 2
    apart, mixed = (whole.slowed(prefill=prefill, decode=decode, mixed=m) for m in (False, True))
    without, within = step.step_s(0, 0, batch, context), step.step_s(tokens, pairs, batch, context)
    assert apart.decode.step_s(tokens, pairs, batch, context) == pytest.approx(decode * within)
    for slow in (apart, mixed):
        assert slow.prefill.step_s(tokens, pairs, batch, 0) == pytest.approx(
            prefill * step.step_s(tokens, pairs, batch, 0)
        )
        assert slow.decode.step_s(0, 0, batch, context) == pytest.approx(decode * without)
        assert (slow.path, slow.interference) == (whole.path, whole.interference)
    if step is plans.TABLE:
        prompts_s = mixed.decode.step_s(tokens, pairs, batch, context) - decode * without
        assert prompts_s == pytest.approx(prefill * (within - without))
    assert whole.slowed(prefill=1, decode=1, mixed=True) == whole


def test_a_line_is_steeper_beyond_each_knee() -> None:
    """Each token takes as much more as the knees before it say, and each knee has its slope."""
    line = replace(FITTED, stream_s=0.0, per_pair_s=0.0)
    slopes = [line.step_s(n + 1, 0, 0, 0) - line.step_s(n, 0, 0, 0) for n in (47, 48, 223, 224)]
    rises = np.array(slopes) - line.per_prefill_token_s
    assert rises == pytest.approx([0, 1e-5, 1e-5, 3e-5])
    with pytest.raises(InputError, match="2 numbers"):
        replace(line, knee_per_token_s=(1e-5,))


def test_a_table_is_linear_between_its_points() -> None:
    """At points, between them, beside sequences, beyond the grid, and after cached tokens."""
    step = PlannedStep(plans.TABLE)
    for chunks, batch, context, expected_s in (
        ([(100, 0)], 0, 0, 0.002 + 1e-6 * 50.5),
        ([(250, 0)], 0, 0, 0.0035 + 1.5e-6 * 125.5),
        ([(50, 10), (50, 0)], 0, 0, 0.002 + 1e-6 * (50 * 35.5 + 50 * 25.5) / 100),
        ([(250, 0)], 4, 1000, 0.00475 + 1.5e-6 * 125.5 + 1.5e-4),
        ([(700, 0)], 0, 0, 0.008 + 3e-6 * 350.5),
        ([], 4, 1000, 0.002 + 1.5e-4),
        ([], 16, 1000, 0.005 + 3e-4),
    ):
        assert step.step_s(chunks, batch, context) == pytest.approx(expected_s), (chunks, batch)
        if not chunks:
            fixed_s, per_token_s = step.decode_line(batch)
            assert fixed_s + per_token_s * context == pytest.approx(expected_s)


@STEPS
def test_equal_prompts_share_a_step(step: StepSpec) -> None:
    """Closed forms of arrays are the steps that are simulated."""
    planned = PlannedStep(step)
    found = prefill_s(step, [30, 120], 10, 3)
    assert list(found) == pytest.approx([planned.step_s([(n, 10)] * 3, 0, 0) for n in (30, 120)])
    assert float(decode_s(step, 4, 500)) == pytest.approx(planned.step_s((), 4, 2000))


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequences": (0.0, 4.0, 8.0)},
        {"tokens": (0.0, 9.0)},
        {"tokens": (0.0, 400.0, 100.0)},
        {"tokens": (1.0, 100.0, 400.0)},
        {"per_key_s": (0.0,)},
        {"fixed_s": ((0.001, 0.002, 0.005), (0.003, 0.004, -0.008))},
    ],
)
def test_a_table_has_a_time_for_every_point(wrong: dict[str, tuple[float, ...]]) -> None:
    """Columns and rows are those of a grid that ascends from 0."""
    with pytest.raises(InputError):
        replace(plans.TABLE, **wrong)
