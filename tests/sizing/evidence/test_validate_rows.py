"""Measured rows: what is read, and what is said of a line that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from minicluster.errors import InputError
from sizing.evidence.measured_row import MeasuredRow
from sizing.evidence.row import RefusedRow, read_rows, row_from
from tests.sizing.evidence.rows import CELLS, SPLIT, row, write_rows

CLOSED = CELLS | {
    "tp": "2", "pp": "2", "ttft_s": "0.1", "tpot_s": "0.01", "requests_per_s": "", "ep": "1",
    "length_jitter": "0.2", "prefix_tokens": "", "statistic": "mean", "tpot_p99_s": "",
}  # fmt: skip


def test_gpus_that_tp_and_pp_leave_are_copies_of_attention() -> None:
    """8 GPUs = tp 2 x pp 2 x dp 2; in pools, EP wider than TP is attention data parallel."""
    slicing = row_from(CLOSED, "rows.csv:2").groups[0].slicing
    assert (slicing.tp, slicing.pp, slicing.dp, slicing.gpus) == (2, 2, 2, 8)
    wide = {"gpus": "64", "prefill_tp": "1", "prefill_ep": "16", "decode_replicas": "3"}
    pools = row(**SPLIT | wide | {"decode_tp": "16", "decode_ep": "16"})
    prefill, decode = pools.groups
    assert (prefill.replicas, prefill.slicing.dp, prefill.slicing.gpus) == (1, 16, 16)
    assert (decode.replicas, decode.slicing.dp, decode.slicing.gpus) == (3, 1, 16)


@pytest.mark.parametrize(
    ("cells", "replicas", "dp"),
    [
        ({"gpus": "8"}, 1, 4),
        ({"gpus": "8", "dp": "4"}, 1, 4),
        ({"gpus": "8", "replicas": "4"}, 4, 1),
        ({"gpus": "8", "replicas": "2"}, 2, 2),
        ({"gpus": "8", "replicas": "2", "dp": "2"}, 2, 2),
        ({"gpus": "8", "ep": "8", "replicas": "9"}, 1, 4),
    ],
)
def test_copies_are_replicas_or_attention_ranks(
    cells: dict[str, str], replicas: int, dp: int
) -> None:
    """GPUs over tp 2 are shared out; an expert-parallel row may be one of its replicas."""
    [group] = row(**{"tp": "2"} | cells).groups
    assert (group.replicas, group.slicing.dp) == (replicas, dp)


@pytest.mark.parametrize(
    ("column", "text", "said"),
    [
        ("isl", "", "it has to be a number above 0"),
        ("isl", "12.5", "it has to be a whole number from 1 to 4,194,304"),
        ("osl", "nan", "it has to be a finite number"),
        ("gpus", "6", "it has to be a multiple of tp x pp = 4"),
        ("ep", "3", "it has to be a divisor of the 4 GPUs of a stage"),
        ("load", "burst", "it has to be one of static, closed, open"),
        ("serving", "both", "it has to be one of aggregated, disaggregated"),
        ("concurrency", "-1", "it has to be a finite number above 0"),
        ("length_jitter", "1", "it has to be 0 or more and below 1"),
        ("prefix_tokens", "1024", "it has to be fewer than isl = 1024"),
        ("statistic", "p99", "it has to be one of mean, median"),
        ("ttft_s", "fast", "it has to be a number above 0"),
        ("decode_dp", "-4", "it has to be a finite number of 0 or more"),
        ("tpot_s", "-0.01", "it has to be a finite number"),
        ("decode_tp", "8", "there is no such width in a row that is aggregated"),
    ],
)
def test_a_bad_cell_is_named(column: str, text: str, said: str) -> None:
    """File and line, column, value and expectation."""
    with pytest.raises(InputError) as refused:
        row_from(CLOSED | {column: text}, "rows.csv:7")
    message = str(refused.value)
    assert message.startswith(f"rows.csv:7: {column} ")
    assert said in message
    if text:
        assert repr(text) in message


def test_every_line_has_an_entry(tmp_path: Path) -> None:
    """A bad line does not hide those after it; a line with too many cells is refused."""
    path = write_rows(tmp_path / "rows.csv", CLOSED, CLOSED | {"id": "two", "isl": "x"})
    with path.open("a", encoding="utf-8") as file:
        file.write(",".join([*(CLOSED | {"id": "three"}).values(), "more"]) + "\n")
        file.write("four\n")
    found = read_rows(path)
    assert [entry.id for entry in found] == ["one", "two", "three", "four"]
    assert [type(entry) for entry in found] == [MeasuredRow, RefusedRow, RefusedRow, RefusedRow]
    assert "rows.csv:3: isl is 'x'" in found[1].reason  # type: ignore[union-attr]


@pytest.mark.parametrize("cells", [{"dp": "3"}, {"replicas": "3"}, {"dp": "2", "replicas": "2"}])
def test_gpus_that_contradict_their_copies_are_refused(cells: dict[str, str]) -> None:
    """8 GPUs of tp 2 x pp 2 are two copies, and no other number of them."""
    with pytest.raises(InputError, match="gpus is '8'; it has to be tp x pp x"):
        row_from(CLOSED | cells, "rows.csv:7")


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    """The first missing column is named."""
    path = tmp_path / "rows.csv"
    path.write_text("id,model\n1,llama\n", encoding="utf-8")
    with pytest.raises(InputError, match="gpu is missing; it has to be a column"):
        read_rows(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_rows(path)
    with pytest.raises(InputError, match="CSV of measured rows"):
        read_rows(tmp_path / "none.csv")
    path.write_text(",".join(CLOSED), encoding="utf-8")
    with pytest.raises(InputError, match="a line for each measurement"):
        read_rows(path)


@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("ttft_s", "ttft_ms"),
        ("tpot_s", "tpot_us"),
        ("tpot_p99_s", "tpot_p99_ms"),
        ("requests_per_s", "requests_per_min"),
    ],
)
def test_a_column_in_another_unit_is_refused(tmp_path: Path, column: str, other: str) -> None:
    """It would be taken for one that was not measured."""
    path = write_rows(tmp_path / "rows.csv", CLOSED)
    path.write_text(path.read_text(encoding="utf-8").replace(column, other), encoding="utf-8")
    with pytest.raises(InputError, match=f"'{other}'; it has to be {column}"):
        read_rows(path)
