"""From timed engine steps to the constants of the step model, with their error."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from minicluster.config import parse, read_json
from minicluster.errors import InputError
from minicluster.plan import step_time
from minicluster.specs.calibration import CalibrationSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from minicluster.specs.calibration import Measurement


def nonnegative_least_squares(
    design: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """
    Return x >= 0 that minimises |design x - target|.

    Solves every subset of columns and keeps the best that has no negative coefficient: exact,
    and cheap for the handful of terms of a step model (2^k solves).

    Args:
        design: shape (rows, k), k at most 10.
        target: shape (rows,).

    Source:
        Lawson and Hanson, Solving Least Squares Problems, chapter 23: the optimum is the
        unconstrained solution on the columns where it is positive.
    """
    columns = design.shape[1]
    best = np.zeros(columns)
    least = float(target @ target)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = design[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(np.sum((part @ solution - target) ** 2))
            if error < least:
                least = error
                best = np.zeros(columns)
                best[list(chosen)] = solution
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class BentLine:
    """
    t = base + slope max(bend, load) + sum of rise max(0, load - knee) + sum of rate x column.

    Attributes:
        rates: of the other columns, in their order.
        knees, rises: loads from which on the line is steeper, and by how much.
        error_fraction: mean absolute relative error over the rows.
    """

    base: float
    slope: float
    bend: float
    rates: tuple[float, ...]
    error_fraction: float
    knees: tuple[float, ...] = ()
    rises: tuple[float, ...] = ()

    def step(self, most: tuple[int, int, int], **rates: float) -> StepCoefficients:
        """
        Return the line as the coefficients of a step (eq. S1).

        Args:
            most: tokens, batch and context up to which it was fitted.
            rates: coefficients of the step other than those that bend; one left out is 0.
        """
        none = dict.fromkeys(
            ("per_prefill_token_s", "per_sequence_s", "per_pair_s", "per_context_token_s"), 0.0
        )
        return StepCoefficients(
            base_s=self.base,
            stream_s=self.slope * self.bend,
            max_tokens=most[0],
            max_batch=most[1],
            max_context_tokens=most[2],
            error_fraction=self.error_fraction,
            knee_tokens=tuple(round(knee) for knee in self.knees),
            knee_per_token_s=self.rises,
            **{**none, **rates},
        )


def fit_bent_line(
    load: NDArray[np.float64],
    columns: Sequence[NDArray[np.float64]],
    seconds: NDArray[np.float64],
    *,
    bend_earns: float,
    weights: NDArray[np.float64] | None = None,
    knee_earns: float = 0.0,
) -> BentLine:
    """
    Fit by least relative squares, no coefficient negative; the bend is tried at every load.

    Args:
        load: what the line bends over, shape (rows,).
        columns: what else the time is linear in, each of shape (rows,).
        seconds: positive, shape (rows,).
        bend_earns: a bend is kept if it leaves less than this share of the squared residual;
            below 1 for measured rows, whose noise some bend always fits a little better.
        weights: of the rows, shape (rows,); without them all count alike.
        knee_earns: the same of each knee, tried at every load once the bend is known.
    """
    roots = np.ones_like(seconds) if weights is None else np.sqrt(weights / weights.mean())
    loads = np.unique(load)
    best, least = _line_at(load, columns, seconds, roots, bend=0.0, knees=())
    for bend in loads[:-1]:
        tried, left = _line_at(load, columns, seconds, roots, bend=float(bend), knees=())
        if left < bend_earns * least:
            best, least = tried, left
    for _ in range(MOST_KNEES):
        tries = [
            _line_at(load, columns, seconds, roots, bend=best.bend, knees=(*best.knees, knee))
            for knee in loads[1:-1].tolist()
            if knee not in best.knees
        ]
        tried, left = min(tries, key=lambda one: one[1], default=(best, least))
        if left >= knee_earns * least:
            break
        best, least = tried, left
    return best


def _line_at(
    load: NDArray[np.float64],
    columns: Sequence[NDArray[np.float64]],
    seconds: NDArray[np.float64],
    roots: NDArray[np.float64],
    *,
    bend: float,
    knees: tuple[float, ...],
) -> tuple[BentLine, float]:
    """Fit the line with these bends; return it, and the squared residual that it leaves."""
    beyond = [np.maximum(0.0, load - knee) for knee in knees]
    design = np.column_stack([np.ones_like(load), np.maximum(bend, load), *beyond, *columns])
    weighted = design / seconds[:, None]
    found = nonnegative_least_squares(weighted * roots[:, None], roots)
    residual = weighted @ found - 1
    base, slope, *rest = (float(value) for value in found)
    line = BentLine(
        base=base,
        slope=slope,
        bend=bend,
        knees=knees,
        rises=tuple(rest[: len(knees)]),
        rates=tuple(rest[len(knees) :]),
        error_fraction=float(np.abs(residual).mean()),
    )
    return line, float((residual * roots) @ (residual * roots))


LEAST_ROWS = 3
"""A line with a bend needs this many points before its residual means anything."""

LEAST_WEIGHT = 0.01

BEND_EARNS, KNEE_EARNS = 0.9, 0.5
"""A bend, or a knee, is kept if it leaves less than this share of the squared residual without."""

MOST_KNEES = 4


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
        interference=fit_interference(busy, alone, prefill, decode),
    )


def read_calibration(path: Path) -> CalibrationSpec:
    """Read a file of `sizing calibrate`, checking every field."""
    raw = read_json(path, "a file of `sizing calibrate`")
    return parse(CalibrationSpec, raw, place=str(path))


def fit_prefill(rows: Sequence[Measurement]) -> StepCoefficients:
    """Fit eq. S2 to prompts of different lengths; needs `LEAST_ROWS` lengths."""
    tokens = _column(rows, "tokens", "prefill")
    line = _line(rows, tokens, tokens * (tokens + 1) / 2, knee_earns=KNEE_EARNS)
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
    rows: Sequence[Measurement],
    load: NDArray[np.float64],
    attended: NDArray[np.float64],
    knee_earns: float = 0.0,
) -> BentLine:
    """
    Fit the seconds of rows, weighed by what other processes left them of the cores.

    A row that lost a share x counts (1 - x)^2 / (1 - x_least)^2, at least 1 %: on a machine that
    is busy all the time every row counts alike, for that is the machine that will serve.
    """
    left = 1.0 - np.array([row.others_fraction for row in rows])
    weights = np.maximum((left / max(left.max(), 1e-9)) ** 2, LEAST_WEIGHT)
    seconds = np.array([row.seconds for row in rows])
    return fit_bent_line(
        *(load, (attended,), seconds),
        bend_earns=BEND_EARNS,
        weights=weights,
        knee_earns=knee_earns,
    )


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
    rows: Sequence[Measurement],
    alone: Sequence[Measurement],
    prefill: StepCoefficients,
    decode: StepCoefficients,
) -> Interference:
    """
    Fit how much longer steps take beside a busy pool than alone (docs/model.md, eq. C2).

    A prompt is compared with those of its length among *alone*, where there are any: what the
    fitted line errs by is no interference. Without *rows* the pools share nothing.
    """
    if not rows:
        return Interference()
    prompts = [row for row in rows if row.phase == "prefill"]
    steps = [row for row in rows if row.phase == "decode"]
    while_busy, per_sequence, per_prompt = _longer(
        np.array([row.seconds for row in prompts]),
        np.array([_prompt_s(row.tokens, alone, prefill) for row in prompts]),
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


def _prompt_s(tokens: int, alone: Sequence[Measurement], prefill: StepCoefficients) -> float:
    timed = [row.seconds for row in alone if (row.phase, row.tokens) == ("prefill", tokens)]
    return float(np.mean(timed)) if timed else float(step_time.prefill_s(prefill, tokens))


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
    values = np.array([getattr(row, name) for row in rows], dtype=np.float64)
    if len(np.unique(values)) < LEAST_ROWS:
        where = f"steps.csv: {phase} rows"
        expected = f"at least {LEAST_ROWS} different values of {name}, the other pool idle"
        raise InputError(where, len(rows), expected, "run `serving measure` again")
    return values
