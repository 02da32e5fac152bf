"""`sizing validate`: files, streams, exit codes, and a sample of public measurements."""

from __future__ import annotations

import csv
import json
import tomllib
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sizing.evidence.validate import COLUMNS
from tests.sizing.conftest import Sizing
from tests.sizing.evidence.rows import write_rows

PUBLISHED = Path(__file__).parents[2] / "published"
SAMPLE = PUBLISHED / "measured_sample.csv"


@pytest.fixture
def validate(sizing: Sizing) -> Sizing:
    return partial(sizing, "validate")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["measured_sample", "measured_sample_2", "measured_h200"])
def test_a_sample_of_public_rows_is_predicted_as_well_as_before(
    name: str, validate: Sizing, tmp_path: Path
) -> None:
    """Every row gets an answer, in order; median errors by source stay within their limits."""
    sample = PUBLISHED / f"{name}.csv"
    held = tomllib.loads(sample.with_suffix(".toml").read_text(encoding="utf-8"))
    out, rows = tmp_path / "predictions.csv", read(sample)
    assert {row["licence"] for row in rows} == {held["licence"]}
    assert {row["source"] for row in rows} == {source["name"] for source in held["sources"]}
    assert validate(str(sample), "-o", str(out)).code == 0
    found = read(out)
    assert [line["id"] for line in found] == [row["id"] for row in rows]
    assert tuple(found[0]) == COLUMNS
    assert {line["status"] for line in found} <= {"predicted", "infeasible"}
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, line in zip(rows, found, strict=True):
        if line["status"] == "infeasible":
            assert float(row["ttft_s"]) > 10, row["id"]
            assert line["reason"]
            assert not line["ttft_s"]
            continue
        for quantity in ("ttft", "tpot"):
            if row[f"{quantity}_s"]:
                value_s = float(line[f"{quantity}_s"])
                error = abs(value_s / float(row[f"{quantity}_s"]) - 1)
                errors[row["source"], quantity].append(error)
                low_s, high_s = (float(line[f"{quantity}_{end}_s"]) for end in ("low", "high"))
                assert low_s <= value_s <= high_s
    for source, limits in held["limits"].items():
        for key, limit in limits.items():
            assert np.median(errors[source, key.partition("_")[0]]) <= limit, (source, key)


def test_a_row_that_cannot_be_predicted_gets_a_line_and_a_reason(
    validate: Sizing, tmp_path: Path
) -> None:
    """`unsupported` with file, line, column and value; exit code 0; `--json` says the same."""
    rows, out = read(SAMPLE)[:3], tmp_path / "predictions.csv"
    rows[1]["model"] = "nobody/Nothing-1B"
    rows[2]["isl"] = ""
    path = str(write_rows(tmp_path / "rows.csv", *rows))
    done = validate(path, "-o", str(out))
    assert done.code == 0
    good, model, length = read(out)
    assert good["status"] == "predicted"
    assert (model["status"], length["status"]) == ("unsupported", "unsupported")
    assert f"{path}:3: model is 'nobody/Nothing-1B'" in model["reason"]
    assert f"{path}:4: isl is missing" in length["reason"]
    assert done.out.index("Rows without errors") < done.out.index("Errors by all")

    document: dict[str, Any] = json.loads(validate(path, "--json").out)
    keys = ("errors", "coverage", "claims", "left_out", "unsupported", "not_scored", "rows")
    assert tuple(document) == keys
    assert [tuple(row) for row in document["rows"]] == [COLUMNS] * 3
    assert document["errors"][0]["name"] == "all"
    assert sum(reason["rows"] for reason in document["unsupported"]) == 2


def test_interrupted_it_leaves_no_file(
    validate: Sizing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle: exit code 130 and no half-written predictions."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sizing.evidence.validate.judge", interrupt)
    out = tmp_path / "predictions.csv"
    assert validate(str(SAMPLE), "-o", str(out)).code == 130
    done = validate(str(tmp_path / "none.csv"), "-o", str(out))
    assert (done.code, done.out) == (2, "")
    assert "none.csv" in done.err
    assert list(tmp_path.iterdir()) == []
