"""Every claim of the seed documents, with our value out of what our command prints."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from math import isclose
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from typer.testing import CliRunner

from sizing import catalog
from sizing.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

CLAIMS = Path(__file__).parents[1] / "tests" / "published" / "seed_claims.csv"
TITLES = {
    "reproduce": "Reproduced",
    "property": "Properties that hold",
    "erroneous": "Wrong in the seed or its transcription",
    "context": "Context without a number to compute",
}
"""Headings of docs/seeds.md by kind of claim."""

NAMED = "3%"
AS_PRINTED = "0.5%"
GROUPED = (1e3, 1e6)
"""Whole numbers between these are written with commas."""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

Value = float | bool | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """
    One row of the claims, by the columns of their file.

    Attributes:
        command: ours, that prints what `answer` needs; empty where there is nothing to compute.
        answer: an expression over what it prints.
    """

    kind: str
    claim: str
    seed_file: str
    expected_value: str
    unit: str
    tolerance: str
    note: str
    command: str
    answer: str

    @property
    def value(self) -> Value | None:
        """Our value; `None` where there is nothing to compute."""
        return answered(self.command, self.answer) if self.answer else None

    @property
    def holds(self) -> bool:
        """
        Whether our value is the expected one (of a wrong claim, the corrected one).

        A corrected round name is meant to 3 %: 70B for 68.98 billion, 32K for 32,768.
        """
        value = self.value
        if isinstance(value, bool):
            return value
        named = self.kind == "erroneous" and self.tolerance == "0"
        tolerance = NAMED if named else self.tolerance
        return value is not None and within(value, self.expected_value, tolerance)

    @property
    def shown(self) -> str:
        """Our value with four digits."""
        return _shown(self.value)


def claims() -> list[Claim]:
    """Return every claim."""
    with CLAIMS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [Claim(**{key.name: row[key.name] for key in fields(Claim)}) for row in rows]


def answered(command: str, answer: str) -> Value:
    """Return the value of the expression *answer* over what *command* prints."""
    names = {
        "out": printed(command),
        "one": one,
        "catalog": catalog,
        "pairwise": pairwise,
        "isclose": isclose,
        "Path": Path,
        "DAY": 86_400.0,
    }
    value = eval(answer, names)  # noqa: S307  (our own file)
    return tuple(value) if isinstance(value, list) else value


@cache
def printed(command: str) -> Any:  # noqa: ANN401  (any JSON, objects with attributes)
    """Run a command of `sizing` with --json."""
    done = CliRunner().invoke(app, [*command.split()[1:], "--json"])
    if done.exit_code:
        raise RuntimeError(f"{command}: exit code {done.exit_code}") from done.exception
    return json.loads(done.stdout, object_hook=lambda found: SimpleNamespace(**found))


def one(rows: Iterable[Any], **wanted: object) -> Any:  # noqa: ANN401
    """Return the row whose attributes are those wanted."""
    [found] = [
        row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())
    ]
    return found


def within(value: float | tuple[float, ...], expected: str, tolerance: str) -> bool:
    """Compare as the tolerance column says: 5%, 0.5 pt, range, <=x, >x, x2, lower bound, 0, -."""
    got = np.atleast_1d(np.asarray(value, dtype=float))
    text = expected.replace("^", "")
    if tolerance == "range" or re.fullmatch(r"[\d.]+-[\d.]+", text):
        low, high = (float(each) for each in text.split("-"))
        return bool((got >= low * 0.99).all() and (got <= high * 1.01).all())
    wanted = np.array([float(each) for each in NUMBER.findall(text)])
    return got.shape == wanted.shape and bool(np.all(_close(got, wanted, tolerance)))


def _close(
    got: NDArray[np.float64], wanted: NDArray[np.float64], tolerance: str
) -> NDArray[np.bool_]:
    """Compare number by number."""
    if tolerance.startswith("<="):
        return got <= float(tolerance[2:])
    if tolerance.startswith(">"):
        return (got > float(tolerance[1:])) & _close(got, wanted, "1%")
    if tolerance == "x2":
        return np.abs(np.log2(got / wanted)) <= 1
    if tolerance in {"0", "-"}:
        tolerance = AS_PRINTED
    if tolerance.endswith("%"):
        return np.abs(got / wanted - 1) <= float(tolerance[:-1]) / 100 + 1e-9
    return np.abs(got - wanted) <= float(tolerance.split(maxsplit=1)[0])


def cell(text: str) -> str:
    """Return text escaped for a table."""
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def _shown(value: Value | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "holds" if value else "does not hold"
    if isinstance(value, tuple):
        return " / ".join(_shown(each) for each in value)
    if GROUPED[0] <= abs(value) < GROUPED[1] and value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
