"""From timed engine steps to the constants of the step model, with their error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.config import parse, read_json
from minicluster.errors import InputError
from minicluster.plan import step_time
from minicluster.specs.calibration import CalibrationSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from sizing.latency.least_squares import BentLine, fit_bent_line, nonnegative_least_squares

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from minicluster.specs.calibration import Measurement

LEAST_ROWS = 3
"""A line with a bend needs this many points before its residual means anything."""

LEAST_WEIGHT = 0.01

BEND_EARNS = 0.9
"""A bend is kept if it leaves less than this share of the squared residual without it."""


def fit_calibration(rows: Sequence[Measurement], *, name: str) -> CalibrationSpec:
    """
    Fit all constants of one machine.

    Steps are fitted on the rows whose other pool was idle; how much slower the same grid points
    are while it is busy is the interference (docs/model.md, eq. C1 to C3).

    Raises:
        InputError: too few rows of a phase.
    """
    alone = [row for row in rows if row.other_busy_fraction == 0]
    prefill = fit_prefill([row for row in alone if row.phase == "prefill"])
    decode = fit_decode([row for row in alone if row.phase == "decode"])
    busy = [row for row in rows if row.other_busy_fraction > 0]
    return CalibrationSpec(
        name=name,
        date=max(row.date for row in rows),
        key=rows[0].key,
        num_rows=len(rows),
        prefill=prefill,
        decode=decode,
        path=fit_path([row for row in alone if row.phase in ("request", "path")], prefill, decode),
        interference=fit_interference(busy, prefill, decode),
    )


def read_calibration(path: Path) -> CalibrationSpec:
    """Read a file of `sizing calibrate`, checking every field."""
    raw = read_json(path, "a file of `sizing calibrate`")
    return parse(CalibrationSpec, raw, place=str(path))


def fit_prefill(rows: Sequence[Measurement]) -> StepCoefficients:
    """Fit eq. S2 to prompts of different lengths; needs `LEAST_ROWS` lengths."""
    tokens = _column(rows, "tokens", "prefill")
    line = _line(rows, tokens, tokens * (tokens + 1) / 2)
    longest = int(tokens.max())
    most = (longest, 1, longest)
    return line.step(most, per_prefill_token_s=line.slope, per_pair_s=line.rates[0])


def fit_decode(rows: Sequence[Measurement]) -> StepCoefficients:
    """Fit eq. S3 to batches of different sizes and contexts; needs `LEAST_ROWS` sizes."""
    batch = _column(rows, "batch", "decode")
    context = np.array([row.context for row in rows])
    line = _line(rows, batch, batch * context)
    most = (int(batch.max()), int(batch.max()), int(context.max()))
    return line.step(most, per_sequence_s=line.slope, per_context_token_s=line.rates[0])


def _line(
    rows: Sequence[Measurement], load: NDArray[np.float64], attended: NDArray[np.float64]
) -> BentLine:
    """
    Fit the seconds of rows, weighed by what other processes left them of the cores.

    A row that lost a share x counts (1 - x)^2 / (1 - x_least)^2, at least 1 %: on a machine that
    is busy all the time every row counts alike, for that is the machine that will serve.
    """
    left = 1.0 - np.array([row.others_fraction for row in rows])
    weights = np.maximum((left / max(left.max(), 1e-9)) ** 2, LEAST_WEIGHT)
    seconds = np.array([row.seconds for row in rows])
    return fit_bent_line(load, (attended,), seconds, bend_earns=BEND_EARNS, weights=weights)


def fit_path(
    rows: Sequence[Measurement], prefill: StepCoefficients, decode: StepCoefficients
) -> PathCoefficients:
    """
    Fit what a request spends outside the two steps (docs/model.md, eq. C3).

    The idle TTFT of the prefill pool alone, less the prefill, is `request_s`. What the whole
    path takes beyond that, less one decode step, is the KV pull.
    """
    request = [row for row in rows if row.phase == "request"]
    path = [row for row in rows if row.phase == "path"]
    if not request or not path:
        raise InputError(
            "steps.csv", f"{len(request)} request and {len(path)} path rows", "at least one of each"
        )
    beyond = [row.seconds - float(step_time.prefill_s(prefill, row.tokens)) for row in request]
    request_s = max(0.0, float(np.median(beyond)))
    tokens = np.array([row.tokens for row in path], dtype=np.float64)
    measured = np.array([row.seconds for row in path])
    steps = step_time.prefill_s(prefill, tokens) + step_time.decode_s(decode, 1, tokens)
    pull = np.maximum(measured - steps - request_s, 0.0)
    base, per_token = nonnegative_least_squares(
        np.column_stack([np.ones_like(tokens), tokens]) / measured[:, None], pull / measured
    )
    predicted = steps + request_s + base + per_token * tokens
    return PathCoefficients(
        request_s=request_s,
        transfer_base_s=float(base),
        transfer_per_token_s=float(per_token),
        error_fraction=float(np.mean(np.abs(predicted / measured - 1))),
    )


def fit_interference(
    rows: Sequence[Measurement], prefill: StepCoefficients, decode: StepCoefficients
) -> Interference:
    """
    Fit how much longer steps take beside a busy pool than alone (docs/model.md, eq. C2).

    Without such rows the pools share nothing.
    """
    if not rows:
        return Interference()
    prompts = [row for row in rows if row.phase == "prefill"]
    steps = [row for row in rows if row.phase == "decode"]
    while_busy, per_sequence, per_prompt = _longer(
        np.array([row.seconds for row in prompts]),
        step_time.prefill_s(prefill, [row.tokens for row in prompts]),
        fractions=np.array([(1.0, row.other_batch) for row in prompts]),
        times=np.ones(len(prompts)),
    )
    beside_prefill, per_join = _longer(
        np.array([row.seconds for row in steps]),
        step_time.decode_s(decode, [row.batch for row in steps], [row.context for row in steps]),
        fractions=np.array([(row.other_busy_fraction,) for row in steps]),
        times=np.array([row.joins for row in steps]),
    )
    return Interference(
        prefill_fraction=while_busy,
        prefill_per_sequence_fraction=per_sequence,
        prefill_per_request_s=per_prompt,
        decode_fraction=beside_prefill,
        decode_per_request_s=per_join,
    )


def _longer(
    seconds: NDArray[np.float64],
    alone_s: NDArray[np.float64],
    *,
    fractions: NDArray[np.float64],
    times: NDArray[np.float64],
) -> list[float]:
    """
    Fit seconds / alone = 1 + fractions . x + times h / alone, x and h not negative.

    Args:
        seconds: measured, shape (rows,).
        alone_s: what the same step takes alone, shape (rows,).
        fractions: what each of x counts for, shape (rows, terms).
        times: how often h is paid, shape (rows,).

    Returns:
        x, then h in seconds.
    """
    columns = np.column_stack([fractions, times / alone_s])
    found = nonnegative_least_squares(columns, np.maximum(seconds / alone_s - 1, 0.0))
    return [float(value) for value in found]


def _column(rows: Sequence[Measurement], name: str, phase: str) -> NDArray[np.float64]:
    """Return one column, or say that the grid is too small."""
    values = np.array([getattr(row, name) for row in rows], dtype=np.float64)
    if len(np.unique(values)) < LEAST_ROWS:
        where = f"steps.csv: {phase} rows"
        expected = f"at least {LEAST_ROWS} different values of {name}, the other pool idle"
        raise InputError(where, len(rows), expected, "run `serving measure` again")
    return values
