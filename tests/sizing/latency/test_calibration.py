"""The fit gives back the constants that made the rows, and says how far off it is."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.specs.calibration import (
    CalibrationKey,
    Measurement,
    read_measurements,
    write_measurements,
)
from sizing.latency.calibration import fit_calibration, fit_decode, fit_prefill
from sizing.latency.least_squares import nonnegative_least_squares

KEY = CalibrationKey(
    processor="test",
    cores=2,
    engine="vllm",
    engine_version="0.29.0",
    model_config_hash="0" * 16,
    dtype="bf16",
)


def row(phase: str, seconds: float, **of: float) -> Measurement:
    """Return a row with what a test does not care about filled in."""
    return Measurement(
        phase=phase,
        tokens=int(of.get("tokens", 0)),
        batch=int(of.get("batch", 0)),
        context=of.get("context", 0.0),
        other_busy_fraction=of.get("busy", 0.0),
        repeats=5,
        seconds=seconds,
        date="2026-11-20",
        key=KEY,
    )


def grid(slow_prefill: float = 0.3, slow_decode: float = 0.5) -> list[Measurement]:
    """Return rows of a made-up machine: prefill 10 ms + 0.5 ms a token, decode 8 ms + 1 ms."""
    rows = []
    for busy in (0.0, 1.0):
        rows += [
            row(
                "prefill",
                (0.010 + 0.0005 * n + 1e-7 * n * (n + 1) / 2) * (1 + busy * slow_prefill),
                tokens=n,
                busy=busy,
            )
            for n in (32, 96, 256, 640)
        ]
        rows += [
            row(
                "decode",
                (0.008 + 0.001 * b + 1e-6 * b * s) * (1 + busy * slow_decode),
                batch=b,
                context=s,
                busy=busy,
            )
            for b in (1, 2, 4, 8)
            for s in (50, 400)
        ]
    for n in (40, 300):
        prefill = 0.010 + 0.0005 * n + 1e-7 * n * (n + 1) / 2
        rows.append(row("request", prefill + 0.012, tokens=n))
        decode = 0.009 + 1e-6 * n
        rows.append(row("path", prefill + decode + 0.012 + 0.005 + 2e-5 * n, tokens=n))
    return rows


def test_exact_rows_give_back_the_constants() -> None:
    """Without noise every constant is recovered and the residual is nothing."""
    fitted = fit_calibration(grid(), name="made up")

    assert fitted.prefill.per_prefill_token_s == pytest.approx(0.0005, rel=1e-3)
    assert fitted.prefill.per_pair_s == pytest.approx(1e-7, rel=1e-2)
    assert fitted.decode.per_context_token_s == pytest.approx(1e-6, rel=1e-3)
    assert fitted.path.request_s == pytest.approx(0.012, rel=1e-3)
    assert fitted.path.transfer_base_s == pytest.approx(0.005, rel=1e-2)
    assert fitted.path.transfer_per_token_s == pytest.approx(2e-5, rel=1e-2)
    assert fitted.interference.prefill_fraction == pytest.approx(0.3, rel=1e-3)
    assert fitted.interference.decode_fraction == pytest.approx(0.5, rel=1e-3)
    assert fitted.prefill.error_fraction < 1e-6
    assert fitted.num_rows == len(grid())


def test_interference_is_per_share_of_busy_time() -> None:
    half = [
        replace(r, other_busy_fraction=0.5) if r.other_busy_fraction else r for r in grid(0.2, 0.4)
    ]

    fitted = fit_calibration(half, name="half")

    assert fitted.interference.prefill_fraction == pytest.approx(0.2, rel=1e-3)
    assert fitted.interference.decode_fraction == pytest.approx(0.8, rel=1e-3)


def test_bend_is_found() -> None:
    """Where weights are streamed first and computing takes over later, both ends are fitted."""
    rows = [
        row("decode", 0.002 + max(0.004, 0.001 * b), batch=b, context=1) for b in (1, 2, 4, 8, 16)
    ]

    fitted = fit_decode(rows)

    assert fitted.stream_s == pytest.approx(0.004, rel=1e-6)
    assert fitted.error_fraction < 1e-9


@given(noise=st.lists(st.floats(-0.05, 0.05), min_size=5, max_size=5))
def test_residual_is_no_more_than_the_noise(noise: list[float]) -> None:
    """Rows within 5 % of a line are fitted within 5 %, and no constant is negative."""
    sizes = (16, 64, 128, 320, 700)
    rows = [
        row("prefill", (0.02 + 0.0004 * n) * (1 + e), tokens=n)
        for n, e in zip(sizes, noise, strict=True)
    ]

    assert fit_prefill(rows).error_fraction <= 0.05 + 1e-9


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


def test_rows_survive_the_file(tmp_path: Path) -> None:
    """What is written is what is read."""
    rows = tuple(grid())
    write_measurements(tmp_path / "steps.csv", rows)

    assert read_measurements(tmp_path / "steps.csv") == rows


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seconds": "-1"}, "line 2: seconds"),
        ({"seconds": "fast"}, "line 2: seconds"),
        ({"seconds": "0"}, "line 2: seconds"),
        ({"seconds": "nan"}, "line 2: seconds"),
        ({"seconds": "inf"}, "line 2: seconds"),
        ({"seconds": "1e999"}, "line 2: seconds"),
        ({"seconds": "-inf"}, "line 2: seconds"),
        ({"seconds": ""}, "line 2: seconds"),
        ({"batch": "nan"}, "line 2: batch"),
        ({"context": "-1"}, "line 2: context"),
        ({"joins": "inf"}, "line 2: joins"),
        ({"tokens": "-32"}, "line 2: tokens"),
        ({"tokens": "3.5"}, "line 2: tokens"),
        ({"repeats": "0"}, "line 2: repeats"),
        ({"phase": "lunch"}, "line 2: phase"),
        ({"cores": "two"}, "line 2: cores"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, change: dict[str, str], named: str) -> None:
    path = tmp_path / "steps.csv"
    write_measurements(path, grid()[:1])
    with path.open(newline="") as file:
        line = next(csv.DictReader(file)) | change
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(line))
        writer.writeheader()
        writer.writerow(line)

    with pytest.raises(InputError, match=named):
        read_measurements(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"phase,tokens\n", b"\xff\xfe\x00\x01", b"phase\n" + b"x" * 200_000],
    ids=["empty", "head", "not UTF-8", "endless cell"],
)
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


def test_rows_of_two_machines_are_refused(tmp_path: Path) -> None:
    first, second, *_ = grid()
    other = replace(second, key=CalibrationKey(**(asdict(KEY) | {"cores": 64})))
    write_measurements(tmp_path / "steps.csv", [first, other])

    with pytest.raises(InputError, match="several machines"):
        read_measurements(tmp_path / "steps.csv")


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
