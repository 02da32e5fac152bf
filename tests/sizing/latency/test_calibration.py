"""The fit gives back the constants that made the rows, and says how far off it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.files import read_table, write_table
from minicluster.specs.calibration import (
    CalibrationKey,
    Measurement,
    read_measurements,
    write_measurements,
)
from sizing.latency.calibration import (
    fit_calibration,
    fit_decode,
    fit_prefill,
    nonnegative_least_squares,
)

KEY = CalibrationKey(
    processor="test",
    cores=2,
    engine="vllm",
    engine_version="0.29.0",
    model_config_hash="0" * 16,
    dtype="bf16",
)


def row(phase: str, seconds: float, **of: Any) -> Measurement:  # noqa: ANN401
    """Return a row with what a test does not care about filled in."""
    rest = {"tokens": 0, "batch": 0, "context": 0.0, "other_busy_fraction": 0.0} | of
    return Measurement(phase=phase, seconds=seconds, repeats=5, date="2026-11-20", key=KEY, **rest)


def grid(slow_prefill: float = 0.3, slow_decode: float = 0.5) -> list[Measurement]:
    """Return rows of a made-up machine: prefill 10 ms + 0.5 ms a token, decode 8 ms + 1 ms."""

    def prefill_s(n: int) -> float:
        return 0.010 + 0.0005 * n + 1e-7 * n * (n + 1) / 2

    rows = []
    for busy in (0.0, 1.0):
        for n, held in ((32, 2), (96, 8), (256, 1), (640, 4)):
            seconds = prefill_s(n) * (1 + busy * (slow_prefill + 0.01 * held)) + busy * 0.002
            beside = {"other_busy_fraction": busy, "other_batch": busy * held}
            rows.append(row("prefill", seconds, tokens=n, **beside))
        for at, (b, s) in enumerate(product((1, 2, 4, 8), (50, 400))):
            seconds = (0.008 + 0.001 * b + 1e-6 * b * s) * (1 + busy * slow_decode)
            joins = busy * (at % 3) / 10
            beside = {"other_busy_fraction": busy, "joins": joins}
            rows.append(row("decode", seconds + 0.004 * joins, batch=b, context=float(s), **beside))
    for n in (40, 300):
        rows.append(row("request", prefill_s(n) + 0.012, tokens=n))
        pulled = 0.009 + 1e-6 * n + 0.012 + 0.005 + 2e-5 * n
        rows.append(row("path", prefill_s(n) + pulled, tokens=n))
    return rows


def test_exact_rows_give_back_the_constants() -> None:
    """Without noise every constant is recovered; interference is per share of busy time."""
    fitted = fit_calibration(grid(), name="made up")
    half = [
        replace(each, other_busy_fraction=0.5) if each.other_busy_fraction else each
        for each in grid(0.2, 0.4)
    ]
    beside = fit_calibration(half, name="half").interference
    for found, expected in (
        (fitted.prefill.per_prefill_token_s, 0.0005),
        (fitted.prefill.per_pair_s, 1e-7),
        (fitted.decode.per_sequence_s, 0.001),
        (fitted.decode.per_context_token_s, 1e-6),
        (fitted.path.request_s, 0.012),
        (fitted.path.transfer_base_s, 0.005),
        (fitted.path.transfer_per_token_s, 2e-5),
        (fitted.interference.prefill_fraction, 0.3),
        (fitted.interference.prefill_per_sequence_fraction, 0.01),
        (fitted.interference.prefill_per_request_s, 0.002),
        (fitted.interference.decode_per_request_s, 0.004),
        (fitted.interference.decode_fraction, 0.5),
        (beside.prefill_fraction, 0.2),
        (beside.decode_fraction, 0.8),
    ):
        assert found == pytest.approx(expected, rel=1e-5)
    assert fitted.prefill.error_fraction < 1e-6
    assert fitted.num_rows == len(grid())


@pytest.mark.parametrize("stream_s", [0.004, 0.0])
def test_a_bend_is_found_where_there_is_one(stream_s: float) -> None:
    """Where weights are streamed first both ends are fitted; noise alone makes no bend."""
    noise = np.random.default_rng(8).normal(0, 0 if stream_s else 0.05, size=10)
    rows = [
        row("decode", (0.002 + max(stream_s, 0.001 * b)) * (1 + off), batch=b, context=1.0)
        for b, off in zip((1, 2, 4, 8, 16) * 2, noise, strict=True)
    ]
    fitted = fit_decode(rows)
    assert fitted.stream_s == pytest.approx(stream_s, rel=1e-6)
    assert fitted.error_fraction == pytest.approx(np.abs(noise).mean(), rel=0.5)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_no_coefficient_is_negative_and_the_gradient_points_inwards(seed: int) -> None:
    """The Karush-Kuhn-Tucker conditions of the constrained optimum hold."""
    rng = np.random.default_rng(seed)
    design = rng.normal(size=(8, 4))
    target = rng.normal(size=8)

    x = nonnegative_least_squares(design, target)

    gradient = design.T @ (design @ x - target)
    assert (x >= 0).all()
    assert (gradient > -1e-8).all()
    assert np.abs(gradient * x).max() < 1e-8


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("seconds", ("-1", "0", "fast", "nan", "inf", "1e999", "")),
        ("batch", ("nan",)),
        ("context", ("-1",)),
        ("joins", ("inf",)),
        ("tokens", ("-32", "3.5")),
        ("repeats", ("0",)),
        ("phase", ("lunch",)),
        ("cores", ("two",)),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, column: str, values: tuple[str, ...]) -> None:
    path = tmp_path / "steps.csv"
    write_measurements(path, grid()[:1])
    [(_, line)] = read_table(path, "steps", ())
    for value in values:
        write_table(path, list(line), [(line | {column: value}).values()])
        with pytest.raises(InputError, match=f":2: {column}"):
            read_measurements(path)


@pytest.mark.parametrize(
    "content", [b"", b"phase,tokens\n", b"\xff\xfe\x00\x01", b"phase\n" + b"x" * 200_000],
    ids=["empty", "head", "not UTF-8", "endless cell"],
)  # fmt: skip
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that holds no rows of steps is named, whatever it holds instead."""
    path = tmp_path / "steps.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"steps\.csv"):
        read_measurements(path)


@pytest.mark.parametrize("phase", ["prefill", "decode", "request", "path"])
def test_a_missing_phase_is_refused(phase: str) -> None:
    """A fit without rows of a phase would be invention."""
    with pytest.raises(InputError, match=phase):
        fit_calibration([r for r in grid() if r.phase != phase], name="thin")


def test_rows_survive_the_file_unless_they_are_of_two_machines(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    first, *rest = rows = grid()
    write_measurements(path, rows)
    assert read_measurements(path) == tuple(rows)
    write_measurements(path, [replace(first, key=replace(KEY, cores=64)), *rest])
    with pytest.raises(InputError, match="several machines"):
        read_measurements(path)


def test_a_disturbed_row_counts_less() -> None:
    """A row that others took the core from bends no line; a machine always busy fits as it is."""
    true = [row("prefill", 0.01 + 0.001 * tokens, tokens=tokens) for tokens in (16, 64, 256, 512)]
    late = replace(true[-1], seconds=2 * true[-1].seconds, others_fraction=0.8)
    alike = [replace(each, others_fraction=0.5) for each in true]

    fitted = fit_prefill([*true[:-1], true[-1], late])
    unknowing = fit_prefill([*true[:-1], true[-1], replace(late, others_fraction=0.0)])

    assert fitted.per_prefill_token_s == pytest.approx(0.001, rel=0.05)
    assert unknowing.per_prefill_token_s != pytest.approx(0.001, rel=0.05)
    assert fit_prefill(alike) == fit_prefill(true)


def test_a_fit_says_how_far_its_rows_went() -> None:
    """Tokens of a prompt, sequences of a batch and context: beyond them a plan is refused."""
    fitted, rows = fit_calibration(grid(), name="made up"), grid()
    longest = max(each.tokens for each in rows if each.phase == "prefill")
    batch, context = (
        max(getattr(each, name) for each in rows if each.phase == "decode")
        for name in ("batch", "context")
    )
    for step, most in (
        (fitted.prefill, (longest, 1, longest)),
        (fitted.decode, (batch, batch, context)),
    ):
        assert (step.max_tokens, step.max_batch, step.max_context_tokens) == most
