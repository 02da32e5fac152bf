"""`sizing validate`: files, streams, exit codes, and a sample of public measurements."""

from __future__ import annotations

import csv
import json
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sizing.evidence.validate import COLUMNS

if TYPE_CHECKING:
    from tests.sizing.conftest import Sizing

PUBLISHED = Path(__file__).parents[2] / "published"
SAMPLE = PUBLISHED / "measured_sample.csv"
HELD = tomllib.loads((PUBLISHED / "measured_sample.toml").read_text(encoding="utf-8"))


@pytest.fixture
def validate(sizing: Sizing) -> Sizing:
    """Return the command."""
    return partial(sizing, "validate")


def sample() -> list[dict[str, str]]:
    """Return the rows of the sample."""
    with SAMPLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def predictions(path: Path) -> list[dict[str, str]]:
    """Read what -o wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_sample_may_be_in_the_repository() -> None:
    """Every row of it is Apache-2.0 and its source is credited."""
    credited = {source["name"] for source in HELD["sources"]}
    assert {row["licence"] for row in sample()} == {HELD["licence"]}
    assert {row["source"] for row in sample()} == credited


def test_a_sample_of_public_rows_is_predicted_as_well_as_before(
    validate: Sizing, tmp_path: Path
) -> None:
    """Every row gets an answer, in order; median errors by source stay within their limits."""
    out = tmp_path / "predictions.csv"
    done = validate(str(SAMPLE), "-o", str(out))
    assert done.code == 0
    found = predictions(out)
    rows = sample()
    assert [line["id"] for line in found] == [row["id"] for row in rows]
    assert tuple(found[0]) == COLUMNS
    assert {line["status"] for line in found} <= {"predicted", "infeasible"}
    errors: dict[tuple[str, str], list[float]] = {}
    for row, line in zip(rows, found, strict=True):
        for name in ("ttft", "tpot"):
            if line["status"] == "predicted" and row[f"{name}_s"]:
                error = abs(float(line[f"{name}_s"]) / float(row[f"{name}_s"]) - 1)
                errors.setdefault((row["source"], name), []).append(error)
                low, high = float(line[f"{name}_low_s"]), float(line[f"{name}_high_s"])
                assert low <= float(line[f"{name}_s"]) <= high
    for source, limits in HELD["limits"].items():
        for name, limit in limits.items():
            assert np.median(errors[source, name.partition("_")[0]]) <= limit, (source, name)


def test_what_is_called_infeasible_was_overloaded(validate: Sizing, tmp_path: Path) -> None:
    """No row of the sample is called infeasible that was served in time."""
    out = tmp_path / "predictions.csv"
    validate(str(SAMPLE), "-o", str(out))
    for row, line in zip(sample(), predictions(out), strict=True):
        if line["status"] == "infeasible":
            assert float(row["ttft_s"]) > 10, row["id"]
            assert line["reason"]
            assert not line["ttft_s"]


def broken(path: Path) -> Path:
    """Write three rows of the sample: one fine, one of an unknown model, one without a length."""
    rows = sample()[:3]
    rows[1]["model"] = "nobody/Nothing-1B"
    rows[2]["isl"] = ""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_that_cannot_be_predicted_gets_a_line_and_a_reason(
    validate: Sizing, tmp_path: Path
) -> None:
    """`unsupported` with file, line, column and value; exit code 0."""
    path, out = broken(tmp_path / "rows.csv"), tmp_path / "predictions.csv"
    done = validate(str(path), "-o", str(out))
    assert done.code == 0
    good, model, length = predictions(out)
    assert good["status"] == "predicted"
    assert (model["status"], length["status"]) == ("unsupported", "unsupported")
    assert f"{path}:3: model is 'nobody/Nothing-1B'" in model["reason"]
    assert f"{path}:4: isl is missing" in length["reason"]
    assert "Rows without a prediction" in done.out


def test_json_is_exactly_the_data(validate: Sizing, tmp_path: Path) -> None:
    """Errors by slice, coverage, reasons, and what -o writes; with --calibrate, the scalars."""
    path = broken(tmp_path / "rows.csv")
    document: dict[str, Any] = json.loads(validate(str(path), "--json", "--calibrate").out)
    assert set(document) == {"errors", "coverage", "claims", "unsupported", "rows", "calibration"}
    assert [tuple(row) for row in document["rows"]] == [COLUMNS] * 3
    assert document["errors"][0]["name"] == "all"
    assert sum(reason["rows"] for reason in document["unsupported"]) == 2


def test_versions_without_constants_are_predicted_and_say_so(
    validate: Sizing, tmp_path: Path
) -> None:
    """An unknown version or engine build is never a ground for `unsupported`."""
    rows = [
        row | {"engine_version": version} for row in sample()[-1:] for version in ("", "x", "9")
    ]
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    out = tmp_path / "predictions.csv"
    validate(str(path), "-o", str(out))
    for line in predictions(out):
        assert line["status"] == "predicted"
        assert "constants of" in line["reason"] or "those of" in line["reason"]


def test_a_file_that_cannot_be_read_is_bad_input(validate: Sizing, tmp_path: Path) -> None:
    """Exit code 2, one line; nothing is written."""
    out = tmp_path / "predictions.csv"
    done = validate(str(tmp_path / "none.csv"), "-o", str(out))
    assert (done.code, done.out, out.exists()) == (2, "", False)
    assert "none.csv" in done.err


def test_interrupted_it_leaves_no_file(
    validate: Sizing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle: exit code 130 and no half-written predictions."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sizing.cli.validate.judge", interrupt)
    out = tmp_path / "predictions.csv"
    assert validate(str(SAMPLE), "-o", str(out)).code == 130
    assert list(tmp_path.iterdir()) == []


def test_times_a_thousand_times_off_are_doubted(validate: Sizing, tmp_path: Path) -> None:
    """Milliseconds in a column of seconds: predicted all the same, and asked about."""
    rows = [row | {"ttft_s": str(float(row["ttft_s"]) * 1e3), "tpot_s": ""} for row in sample()[:3]]
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    done = validate(str(path))
    assert done.code == 0
    assert "are they in seconds?" in " ".join(done.err.split())
