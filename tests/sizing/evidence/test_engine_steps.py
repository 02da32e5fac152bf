"""Engine steps of a load: the pace is found, interference is told from steps, hiccups are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.plan import StepModel
from minicluster.specs.calibration import CalibrationKey, CalibrationSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from minicluster.workload.engine_steps import EngineStep, EngineSteps
from sizing.evidence.refit.engine_steps import (
    FEWEST,
    TimedSteps,
    fit_interference_to_steps,
    modelled_s,
    paces,
    step_gaps,
    timed_steps,
)
from sizing.evidence.refit.fit import at_pace
from sizing.evidence.refit.hiccups import BIN_S, SETTLE_S, find_hiccups, outside
from tests.loadtest.made import make_sample

START_S = 1_795_000_000.0
NO_RATES = {"per_sequence_s": 0.0, "per_context_token_s": 0.0, "per_pair_s": 0.0, "stream_s": 0.0}
MOST = {"max_tokens": 512, "max_batch": 16, "max_context_tokens": 512, "error_fraction": 0.0}
PREFILL = StepCoefficients(base_s=0.01, per_prefill_token_s=1e-4, **NO_RATES, **MOST)
DECODE = StepCoefficients(
    base_s=0.008, per_prefill_token_s=0.0, **NO_RATES | {"per_sequence_s": 1e-3}, **MOST
)
BETWEEN = Interference(prefill_per_sequence_fraction=0.2, decode_fraction=0.5)
MEASURED = CalibrationSpec(
    name="made",
    date="2026-11-28",
    key=CalibrationKey(
        processor="one",
        cores=2,
        engine="vllm",
        engine_version="0.29.0",
        model_config_hash="0",
        dtype="bf16",
    ),
    num_rows=20,
    prefill=PREFILL,
    decode=DECODE,
    path=PathCoefficients(
        request_s=0.01, transfer_base_s=0.01, transfer_per_token_s=0.0, error_fraction=0.0
    ),
    interference=BETWEEN,
)
MODEL = StepModel.calibrated(MEASURED)


def steps_of(model: StepModel, *, seconds: float = 20.0, seed: int = 0) -> EngineSteps:
    """
    Return the steps of two engines that are as fast as *model* says.

    Prefill computes a prompt every tenth of a second, decode always has one to six sequences.
    """
    rng = np.random.default_rng(seed)
    batches = rng.integers(1, 7, size=10_000)
    starts = np.arange(0.05, seconds, 0.1)
    lengths = rng.integers(50, 120, size=len(starts))
    decode: list[EngineStep] = []
    prefill: list[EngineStep] = []
    now_s, at = 0.0, 0
    while now_s < seconds:
        while at < len(starts) and starts[at] <= now_s:
            # Its step began within the decode step that has just ended.
            before = decode[-1]
            prefill.append(
                timed(model, "prefill", starts[at], before.sequences, prompt_tokens=lengths[at])
            )
            at += 1
        ends = [step.end_unix_s - START_S for step in prefill[-1:]]
        busy = float(bool(ends) and ends[0] > now_s)
        decode.append(timed(model, "decode", now_s, busy, sequences=batches[len(decode)]))
        now_s = decode[-1].end_unix_s - START_S
    return kept_steps({"prefill": tuple(prefill), "decode": tuple(decode)})


def kept_steps(of: dict[str, tuple[EngineStep, ...]]) -> EngineSteps:
    """Return steps of a load that started at `START_S`."""
    return EngineSteps(start_unix_s=START_S, of=of)


def timed(
    model: StepModel,
    role: str,
    begin_s: float,
    beside: float,
    *,
    prompt_tokens: int = 0,
    sequences: int = 0,
) -> EngineStep:
    """Return one step that lasts as long as *model* says."""
    column = np.array([1.0])
    content = TimedSteps(
        end_s=column,
        seconds=column,
        prompts=column * bool(prompt_tokens),
        prompt_tokens=column * prompt_tokens,
        pairs=column * 0,
        sequences=column * sequences,
        context_tokens=column * 0,
        joined=column * 0,
        beside=column * beside,
    )
    seconds = float(modelled_s(model, role, content)[0])
    return EngineStep(
        START_S + begin_s + seconds,
        seconds,
        int(bool(prompt_tokens)),
        int(prompt_tokens),
        0,
        int(sequences),
        0,
        0,
    )


def slower(steps: EngineSteps, factors: dict[str, float]) -> EngineSteps:
    """Return the same steps, each of which took longer, where no other step was beside it."""
    longer = {
        role: tuple(
            step._replace(
                end_unix_s=START_S + number + step.seconds, seconds=step.seconds * factors[role]
            )
            for number, step in enumerate(rows)
        )
        for role, rows in steps.of.items()
    }
    return kept_steps(longer)


@given(prefill=st.floats(0.5, 2.0), decode=st.floats(0.5, 2.0))
def test_the_pace_of_each_pool_is_found(prefill: float, decode: float) -> None:
    """Steps that all take a factor longer have that pace, and the model at that pace has them."""
    alone = replace(MODEL, interference=Interference())
    found_steps = slower(steps_of(alone, seconds=4.0), {"prefill": prefill, "decode": decode})
    seen = timed_steps(found_steps)
    found = paces(alone, seen)
    assert found["prefill"].factor == pytest.approx(prefill, rel=1e-6)
    assert found["decode"].factor == pytest.approx(decode, rel=1e-6)
    assert found["prefill"].measured_s == pytest.approx(prefill * found["prefill"].modelled_s)
    now = at_pace(alone, found)
    assert [pace.factor for pace in paces(now, seen).values()] == pytest.approx([1, 1])
    assert now.path.request_s == pytest.approx(alone.path.request_s * (prefill * decode) ** 0.5)


def test_the_model_gives_the_steps_that_it_made() -> None:
    """What the other pool did is seen from the steps alone: the model repeats its own seconds."""
    seen = timed_steps(steps_of(MODEL))
    for role, steps in seen.items():
        apart = np.abs(modelled_s(MODEL, role, steps) / steps.seconds - 1)
        assert np.quantile(apart, 0.97) < 1e-6, role  # but where a step began as another ended
    assert [pace.factor for pace in paces(MODEL, seen).values()] == pytest.approx([1, 1], abs=0.01)


def test_steps_of_too_few_say_nothing() -> None:
    """A pool with a handful of steps has no pace, and nothing is fitted to it."""
    few = {role: rows[: FEWEST - 1] for role, rows in steps_of(MODEL).of.items()}
    seen = timed_steps(kept_steps(few | {"idle": ()}))
    assert paces(MODEL, seen) == {}
    assert at_pace(MODEL, {}) == MODEL
    assert fit_interference_to_steps(MEASURED, seen) == MEASURED
    assert step_gaps(MODEL, seen) == []


def test_interference_is_told_from_steps() -> None:
    """From constants that are all wrong, the steps under load lead back to those behind them."""
    wrong = replace(
        MEASURED,
        prefill=PREFILL.scaled(1.3),
        decode=DECODE.scaled(0.8),
        interference=Interference(prefill_fraction=0.4, prefill_per_request_s=0.005),
    )
    seen = timed_steps(steps_of(MODEL, seconds=60.0))
    found = fit_interference_to_steps(wrong, seen)
    assert found.prefill.base_s == pytest.approx(PREFILL.base_s, rel=0.02)
    assert found.decode.base_s == pytest.approx(DECODE.base_s, rel=0.02)
    assert found.interference.prefill_per_sequence_fraction == pytest.approx(0.2, rel=0.1)
    assert found.interference.decode_fraction == pytest.approx(0.5, rel=0.1)
    assert found.interference.prefill_fraction == found.interference.prefill_per_request_s == 0
    assert found.path == MEASURED.path
    gaps = step_gaps(StepModel.calibrated(found), seen)
    assert len(gaps) == 4  # each pool, alone and beside the other
    assert gaps == pytest.approx([0] * 4, abs=0.02)


def test_a_slow_second_is_cut_out_and_named() -> None:
    """Other work beside the engines for two seconds of twenty is one; a slow machine is not."""
    steps = steps_of(MODEL)
    slow = {
        role: tuple(
            row._replace(seconds=2 * row.seconds) if 8 <= row.end_unix_s - START_S < 10 else row
            for row in rows
        )
        for role, rows in steps.of.items()
    }
    hiccups = find_hiccups([], MODEL, timed_steps(kept_steps(slow)), start_unix_s=START_S)
    assert len(hiccups) == 1
    assert hiccups[0].begin_s == pytest.approx(8, abs=BIN_S)
    assert hiccups[0].end_s == pytest.approx(10 + SETTLE_S, abs=BIN_S)
    assert "steps took 2" in hiccups[0].text or "steps took 1" in hiccups[0].text
    whole = {
        role: tuple(r._replace(seconds=2 * r.seconds) for r in rows)
        for role, rows in steps.of.items()
    }
    assert find_hiccups([], MODEL, timed_steps(kept_steps(whole)), start_unix_s=START_S) == ()


def test_a_client_that_stood_still_is_cut_out_and_named() -> None:
    """Requests that were sent late do not count, nor those that met the queue they left."""
    on_time = [make_sample(k, k / 2) for k in range(20)]
    late = [replace(s, send_s=s.due_s + 0.5) if s.index in (8, 9) else s for s in on_time]
    hiccups = find_hiccups(late, MODEL, {}, start_unix_s=START_S)
    assert [(h.begin_s, h.end_s) for h in hiccups] == [(4.0, 5.0 + SETTLE_S)]
    assert "load client stood still for 0.5 s" in hiccups[0].text
    due_s = np.array([s.due_s for s in late])
    counted = outside(hiccups, due_s, due_s + 0.1)
    assert counted.sum() == 15
    assert not counted[8:13].any()
    assert find_hiccups(on_time, MODEL, {}, start_unix_s=START_S) == ()
