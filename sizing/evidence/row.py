"""Reading measured rows, each line of a CSV."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minicluster.errors import Fault, InputError
from minicluster.files import SURPLUS, read_table
from minicluster.specs.slicing import Slicing
from sizing.evidence.measured_row import Group, MeasuredRow
from sizing.evidence.protocol import jitter_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sizing.evidence.labels import RowLabel


REQUIRED = (
    "id", "model", "gpu", "engine", "weight_dtype", "serving", "gpus", "load", "isl", "osl",
)  # fmt: skip
"""Columns without which no row can be read."""
AMOUNTS = {"static": "batch_size", "closed": "concurrency", "open": "requests_per_s"}
"""The column that says how much of each load."""
SECONDS = ("ttft_s", "tpot_s", "ttft_p99_s", "tpot_p99_s", "requests_per_s")
"""Columns whose unit one can mistake."""
STATISTICS = ("mean", "median")
MOST = 2**22
"""Largest count that a row may have; a larger one is a mistake, and would take hours."""
MOST_USERS = 2**14
"""Most users of a closed loop, and prompts of a static batch."""
MOST_DRAFTS = 32
"""Most drafts of a step, as in a scenario."""
SERVING = ("aggregated", "disaggregated")
WIDTHS = ("replicas", "tp", "pp", "ep", "dp")
"""Columns of an aggregated row; those of a pool have its role before them."""
NUMBERS = (
    *AMOUNTS.values(), *SECONDS, *WIDTHS, "gpus", "isl", "osl", "length_jitter", "prefix_tokens",
    "max_num_batched_tokens", "max_num_seqs", "mtp_tokens", "accepted_tokens", "requests",
    "duration_s", *(f"{role}_{name}" for role in ("prefill", "decode") for name in WIDTHS),
)  # fmt: skip
"""Columns that hold a number or nothing, whether a row's load and serving use them or not."""


def row_from(cells: Mapping[str, str], place: str, surplus: object = None) -> MeasuredRow:
    """
    Read one row.

    Args:
        cells: text by column; an absent column is an empty cell.
        surplus: cells beyond the last column: such a line is shifted, or wrongly quoted.

    Raises:
        InputError: the first cell that cannot be used, with its column, value and expectation.
    """
    if surplus is not None:
        raise InputError(place, surplus, "no more cells than columns")
    line = _Line(cells, place)
    load = line.choice("load", tuple(AMOUNTS))
    amount = line.number(AMOUNTS[load])
    drafts, accepted = _speculation(line)
    row = MeasuredRow(
        place=place,
        id=cells.get("id", ""),
        source=cells.get("source", ""),
        model=line.text("model"),
        gpu=line.text("gpu"),
        engine=line.text("engine"),
        engine_version=cells.get("engine_version", ""),
        weight_dtype=line.text("weight_dtype"),
        kv_dtype=cells.get("kv_dtype", ""),
        groups=_groups(line),
        load=load,
        amount=amount if load == "open" else line.count(AMOUNTS[load], most=MOST_USERS),
        isl=line.count("isl"),
        osl=line.count("osl"),
        length_jitter=line.number(
            "length_jitter",
            default=jitter_of(cells.get("source", ""), cells.get("model", "")),
            least=0.0,
        ),
        prefix_tokens=line.count("prefix_tokens", default=0, least=0),
        statistic=line.choice("statistic", STATISTICS, default="mean"),
        ttft_s=line.measured("ttft_s"),
        tpot_s=line.measured("tpot_s"),
        ttft_p99_s=line.measured("ttft_p99_s"),
        tpot_p99_s=line.measured("tpot_p99_s"),
        token_budget=line.count("max_num_batched_tokens", default=0, least=0) or None,
        max_num_seqs=line.count("max_num_seqs", default=0, least=0) or None,
        measured=cells.get("measured", ""),
        num_requests=line.requests(amount if load == "open" else None),
        means_only=cells.get("lengths") == "distribution",
        speculative_tokens=drafts,
        accepted_tokens=accepted,
    )
    if row.length_jitter >= 1:
        raise line.error("length_jitter", "0 or more and below 1")
    if row.prefix_tokens >= row.isl:
        raise line.error("prefix_tokens", f"fewer than isl = {row.isl}")
    for name in NUMBERS:
        line.number(name, default=0.0, least=0.0)
    return row


def _speculation(line: _Line) -> tuple[int, float | None]:
    """Read the drafts of a step, 0 without them, and how many are accepted, `None`: not counted."""
    says = line.choice("mtp", ("no", "yes"), default="no") == "yes"
    drafts = line.count("mtp_tokens", default=0, least=0, most=MOST_DRAFTS)
    if says != (drafts > 0):
        expected = "the tokens drafted in a step" if says else "0: mtp does not say yes"
        raise line.error("mtp_tokens", expected)
    if not line.cells.get("accepted_tokens"):
        return drafts, None
    accepted = line.number("accepted_tokens", least=0.0)
    if accepted > drafts:
        raise line.error("accepted_tokens", f"at most mtp_tokens = {drafts}")
    return drafts, accepted


def _groups(line: _Line) -> tuple[Group, ...]:
    """Read the replicas; all their GPUs are those of the `gpus` column."""
    serving = line.choice("serving", SERVING)
    gpus = line.count("gpus")
    pools = [f"{role}_{name}" for role in ("prefill", "decode") for name in WIDTHS]
    for name in pools if serving == "aggregated" else WIDTHS:
        if line.number(name, default=1.0, least=0.0) > 1:
            raise line.error(name, f"no such width in a row that is {serving}")
    if serving == "aggregated":
        tp, pp = line.count("tp"), line.count("pp", default=1)
        if gpus % (tp * pp):
            raise line.error("gpus", f"a multiple of tp x pp = {tp * pp}")
        replicas, dp = _copies(line, gpus // (tp * pp))
        slicing = line.slicing("", tp=tp, pp=pp, dp=dp)
        return (Group(role="mixed", replicas=replicas, slicing=slicing),)
    groups = tuple(_pool(line, role) for role in ("prefill", "decode"))
    counted = sum(group.replicas * group.slicing.gpus for group in groups)
    if counted != gpus:
        raise line.error("gpus", f"the {counted} that both pools have together")
    return groups


def _copies(line: _Line, stages: int) -> tuple[int, int]:
    """
    Return the replicas of an aggregated row, and the copies of attention in each.

    Args:
        stages: GPUs over tp x pp. A row of an expert-parallel model whose GPUs are too few for
            all its replicas is of one of them, with that one's share of the load.
    """
    replicas, dp = line.count("replicas", default=1), line.count("dp", default=0, least=0)
    if line.cells.get("ep") not in (None, "", "1") and stages < replicas:
        replicas = 1
    if stages % replicas or (dp and dp * replicas != stages):
        expected = f"tp x pp x {'dp x ' if dp else ''}replicas, or a multiple where dp is empty"
        raise line.error("gpus", expected)
    return replicas, stages // replicas


def _pool(line: _Line, role: str) -> Group:
    """Read the replicas of one pool; without dp, attention is copied where `ep` exceeds `tp`."""
    tp, pp = line.count(f"{role}_tp"), line.count(f"{role}_pp", default=1)
    ep = line.count(f"{role}_ep", default=1)
    dp = line.count(f"{role}_dp", default=max(1, ep // tp))
    slicing = line.slicing(f"{role}_", tp=tp, pp=pp, dp=dp)
    return Group(role=role, replicas=line.count(f"{role}_replicas"), slicing=slicing)


class _Line:
    """Cells of one line, read by type; errors name file, line, column, value, expectation."""

    def __init__(self, cells: Mapping[str, str], place: str) -> None:
        self.cells = cells
        self.place = place

    def error(self, column: str, expectation: str) -> InputError:
        """Return the error for a cell."""
        return InputError(
            f"{self.place}: {column}", self.cells.get(column, "") or None, expectation
        )

    def text(self, column: str) -> str:
        """Read text that must be there."""
        found = self.cells.get(column, "")
        if not found:
            raise self.error(column, "a name")
        return found

    def choice(self, column: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Read one of a few words."""
        found = self.cells.get(column, "") or default
        if found not in allowed:
            raise self.error(column, "one of " + ", ".join(allowed))
        return found

    def number(self, column: str, *, default: float | None = None, least: float = 1e-9) -> float:
        """Read a finite number of at least *least*."""
        text = self.cells.get(column, "")
        if not text and default is not None:
            return default
        bound = "above 0" if least > 0 else "of 0 or more"
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, f"a number {bound}") from None
        if not (math.isfinite(value) and value >= least):
            raise self.error(column, f"a finite number {bound}")
        return value

    def count(
        self, column: str, *, default: int | None = None, least: int = 1, most: int = MOST
    ) -> int:
        """Read a whole number of at least *least* and at most *most*."""
        value = self.number(column, default=default, least=min(least, 1e-9))
        if value != int(value) or not least <= value <= most:
            raise self.error(column, f"a whole number from {least} to {most:,}")
        return int(value)

    def requests(self, requests_per_s: float | None) -> int | None:
        """Read how many requests were sent, by the duration if there is a rate; `None`: unknown."""
        duration_s = self.number("duration_s", default=0.0, least=0.0)
        timed = min(MOST, math.ceil(duration_s * (requests_per_s or 0.0)))
        return self.count("requests", default=0, least=0) or timed or None

    def measured(self, column: str) -> float | None:
        """Read a measured time; empty: not measured."""
        return self.number(column) if self.cells.get(column, "") else None

    def slicing(self, prefix: str, *, tp: int, pp: int, dp: int) -> Slicing:
        """Read the expert parallelism and check that it divides the stage."""
        ep = self.count(f"{prefix}ep", default=1)
        if (tp * dp) % ep:
            raise self.error(f"{prefix}ep", f"a divisor of the {tp * dp} GPUs of a stage")
        return Slicing(tp=tp, pp=pp, ep=ep, dp=dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A line that is no usable row."""

    id: str
    source: str
    reason: str


def read_rows(
    path: Path, labels: Mapping[str, RowLabel] | None = None
) -> tuple[MeasuredRow | RefusedRow, ...]:
    """
    Read measured rows, every line of the file in order.

    Args:
        path: CSV with the columns of the measurement schema (docs/validation.md).
        labels: of rows whose columns are wrong, ambiguous or there twice, by id; of rows with one
            measurement the first is scored.

    Returns:
        A row per line, or why the line is none.

    Raises:
        InputError: no such file, not text, no line, a column missing that every row needs, or
            one in another unit.
    """
    lines = read_table(path, "a CSV of measured rows", REQUIRED)
    if not lines:
        raise InputError(str(path), Fault("is a header alone"), "a line for each measurement")
    columns = lines[0][1]
    for name in SECONDS:
        for column in columns:
            if name not in columns and column.rpartition("_")[0] == name.rpartition("_")[0]:
                raise InputError(f"{path}: column", column, f"{name}: times are in seconds")
    return tuple(_entries(lines, labels or {}))


def _entries(
    lines: Iterable[tuple[str, dict[str, Any]]], labels: Mapping[str, RowLabel]
) -> Iterator[MeasuredRow | RefusedRow]:
    """Yield the lines as rows, mended by their labels; a copy of a line before it is excluded."""
    seen: set[str] = set()
    for place, raw in lines:
        surplus = raw.pop(SURPLUS, None)
        cells = {key: str(value or "").strip() for key, value in raw.items()}
        label = labels.get(cells["id"])
        try:
            row = row_from(cells | (label.cells if label else {}), place, surplus=surplus)
        except InputError as error:
            yield RefusedRow(id=cells["id"], source=cells.get("source", ""), reason=str(error))
            continue
        if label is not None:
            first = sorted(label.copies & seen)
            excluded = label.excluded or (
                f"duplicate: the measurement of {first[0]}" if first else ""
            )
            row = replace(row, excluded=excluded)
        seen.add(row.id)
        yield row
