"""Rows that are not scored: labels, and measurements that no GPU can have made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicluster.errors import InputError
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.evidence.labels import read_labels
from sizing.evidence.measured_row import MeasuredRow
from sizing.evidence.prediction import step_bound_s
from sizing.evidence.row import read_rows
from sizing.evidence.row_config import row_config
from sizing.latency import work as feedforward
from sizing.latency.op import StepLoad, decode_load, prefill_load
from sizing.latency.roofline import multiply_dtype
from sizing.latency.term import Machine
from sizing.latency.work import step_ops
from tests.sizing.conftest import Sizing
from tests.sizing.evidence.rows import CELLS, SPLIT, row, write_rows

WIDTHS = (Slicing(), Slicing(tp=8), Slicing(tp=2, pp=2), Slicing(tp=1, dp=8, ep=8))


def at_peak_s(machine: Machine, load: StepLoad, slicing: Slicing) -> float:
    """Seconds of the ops of a step, each at the GPU's peaks, without exchanges and launches."""
    peaks, hbm = machine.gpu.peak_flops_per_s, machine.gpu.require("hbm_bytes_per_s")
    times = [
        np.maximum(
            op.total.flops / peaks[multiply_dtype(op.dtype, machine.gpu)], op.total.hbm_bytes / hbm
        )
        for op in step_ops(machine.model, load, slicing=slicing)
    ]
    return float(np.sum(times))


@pytest.mark.parametrize("name", catalog.models())
def test_no_step_of_ours_is_faster_than_the_bound(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At peak, with experts equally popular: decode steps of any batch, prompts of any length."""
    monkeypatch.setattr(feedforward, "_popularity", lambda: np.ones(1))
    for gpu in ("b200-sxm", "a100-sxm"):
        config = row_config(row(model=name, gpu=gpu, weight_dtype="bf16", tp="1", gpus="1"))
        for slicing in WIDTHS[: None if config.machine.model.moe else 3]:
            for count in (1, 7, 64, 1024):
                each = count / slicing.dp
                decode = at_peak_s(config.machine, decode_load(each, 1), slicing)
                assert step_bound_s(config.machine, slicing, count) <= decode * (1 + 1e-3)
                prompt = at_peak_s(config.machine, prefill_load(8 * each), slicing)
                bound = step_bound_s(config.machine, slicing, 8 * count, outputs=1)
                assert bound <= prompt * (1 + 1e-3)


def test_the_bound_grows_with_what_is_read_and_computed() -> None:
    """Dense: the weights over the bandwidth; experts: more of them for more tokens."""
    dense = row_config(row(weight_dtype="bf16")).machine
    read_s = 2 * (70.55e9 - 1.05e9) / 8 / dense.gpu.require("hbm_bytes_per_s")
    assert step_bound_s(dense, Slicing(tp=8), 1) == pytest.approx(read_s, rel=0.01)
    moe = row_config(row(**SPLIT)).machine
    times = [step_bound_s(moe, Slicing(tp=8), tokens) for tokens in (1, 8, 64, 4096)]
    assert times == sorted(times)
    assert times[2] > 5 * times[0]
    assert step_bound_s(moe, Slicing(tp=8), 1e6, outputs=1) > 20 * times[2]


@pytest.mark.parametrize(
    ("cells", "quantity"),
    [
        ({"tpot_s": "0.0001"}, "TPOT"),
        ({"ttft_s": "0.0001"}, "TTFT"),
        ({"load": "static", "batch_size": "64", "ttft_s": "0.3"}, "TTFT"),
        (SPLIT | {"tpot_s": "0.0001", "ttft_s": "1"}, "TPOT"),
        (SPLIT | {"ttft_s": "0.002", "tpot_s": "0.02"}, "TTFT"),
    ],
)
def test_rows_below_the_bound_are_suspicious(
    cells: dict[str, str], quantity: str, sizing: Sizing, tmp_path: Path
) -> None:
    """Predicted, printed with the bound and not scored; a hundred times as long, they are."""
    slow = {key: str(100 * float(cells[key])) for key in ("ttft_s", "tpot_s") if key in cells}
    rows = [CELLS | cells, CELLS | cells | slow | {"id": "slow"}]
    found = validated(sizing, tmp_path, rows)
    [unscored] = found["not_scored"]
    assert unscored["id"] == "one"
    assert f"suspicious: the measured {quantity} of" in unscored["reason"]
    assert "not scored" in found["rows"][0]["reason"]
    assert found["errors"][0]["rows"] == 1
    assert [line["status"] for line in found["rows"]] == ["predicted"] * 2


def validated(
    sizing: Sizing, tmp_path: Path, rows: list[dict[str, str]], *options: str
) -> dict[str, Any]:
    """Write rows and return what `sizing validate --json` says of them."""
    path = write_rows(tmp_path / "rows.csv", *rows)
    done = sizing("validate", str(path), "--json", *options)
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


LABELS = """id,kind,labelled,evidence
one,layout,gpus=8 tp=8 ep=1,is gpus=4 tp=2 pp=2: its recipe
two,duplicate within file,,train:three
three,duplicate within file,,train:two
four,ambiguous label,,leave out
elsewhere,ambiguous label,,leave out
"""


def test_labels_mend_rows_and_leave_others_out(sizing: Sizing, tmp_path: Path) -> None:
    """A layout is corrected, one of two equal rows counts, an ambiguous one does not."""
    path = tmp_path / "labels.csv"
    path.write_text(LABELS, encoding="utf-8")
    rows = [CELLS | {"id": name, "ttft_s": "9"} for name in ("one", "two", "three", "four")]
    found = validated(sizing, tmp_path, rows, "--labels", str(path))
    assert found["errors"][0]["rows"] == 2
    reasons = {each["id"]: each["reason"] for each in found["not_scored"]}
    assert reasons == {"three": "duplicate: the measurement of two", "four": "ambiguous label"}
    one, *_ = read_rows(tmp_path / "rows.csv", read_labels(path))
    assert isinstance(one, MeasuredRow)
    [group] = one.groups
    assert (group.slicing.tp, group.slicing.pp, group.slicing.gpus) == (2, 2, 4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("one,moved,,x", "kind is 'moved'; it has to be one of layout"),
        (
            "one,layout,,as its recipe",
            "evidence is 'as its recipe'; it has to be widths, such as tp=8",
        ),
        (
            "one,duplicate within file,,",
            "evidence is missing; it has to be the other row, as train:ID",
        ),
    ],
)
def test_labels_that_say_nothing_are_refused(line: str, said: str, tmp_path: Path) -> None:
    """File, line and column are named."""
    path = tmp_path / "labels.csv"
    path.write_text(f"id,kind,labelled,evidence\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"labels\.csv:2: ") as refused:
        read_labels(path)
    assert said in str(refused.value)
