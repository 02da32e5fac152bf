"""docs/seeds.md: every claim of the seed documents, our command, our value, the verdict."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from seed_answers_networks import NETWORKS
from seed_answers_talks import TALKS
from seed_figures import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "tests" / "published" / "seed_claims.csv"
NAMED = "3%"
AS_PRINTED = "0.5%"
GROUPED = (1e3, 1e6)
"""Whole numbers between these are written with commas."""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row of the claims; `value` is ours, `None` where there is nothing to compute."""

    kind: str
    text: str
    seed: str
    expected: str
    unit: str
    tolerance: str
    note: str
    command: str
    value: Value | None

    @property
    def holds(self) -> bool:
        """
        Whether our value is the expected one (of a wrong claim, the corrected one).

        A corrected round name is meant to 3 %: 70B for 68.98 billion, 32K for 32,768.
        """
        if isinstance(self.value, bool):
            return self.value
        named = self.kind == "erroneous" and self.tolerance == "0"
        tolerance = NAMED if named else self.tolerance
        return self.value is not None and within(self.value, self.expected, tolerance)


def claims() -> list[Claim]:
    """Return every claim with our value."""
    with CLAIMS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [_claim(row) for row in rows]


def _claim(row: dict[str, str]) -> Claim:
    entries = [entry for entry in (*TALKS, *NETWORKS) if entry[0] == row["seed_file"]]
    found = [entry for entry in entries if row["claim"].startswith(entry[1])]
    found.sort(key=lambda entry: -len(entry[1]))
    command, ask = found[0][2:] if found else ("", None)
    return Claim(
        kind=row["kind"],
        text=row["claim"],
        seed=row["seed_file"],
        expected=row["expected_value"],
        unit=row["unit"],
        tolerance=row["tolerance"],
        note=row["note"],
        command=command,
        value=None if ask is None else ask(),
    )


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


def page() -> str:
    """Write docs/seeds.md."""
    found = claims()
    lines = [
        "# What the seed documents claim",
        "",
        (
            "`make docs` generates this page from `tests/published/seed_claims.csv` and from our"
            " functions. The file holds the claims of the five seed documents 000 to 004,"
            " transcribed with their expected values on 2026-11-20."
            " `tests/sizing/cli/test_seeds.py` checks every row. Where a seed document,"
            " its transcription or its source is wrong, our value is the corrected one, and the"
            " note says why."
        ),
        "",
    ]
    titles = {
        "reproduce": "Reproduced",
        "property": "Properties that hold",
        "erroneous": "Wrong in the seed or its transcription",
        "context": "Context without a number to compute",
    }
    for kind, title in titles.items():
        rows = [claim for claim in found if claim.kind == kind]
        held = sum(claim.holds for claim in rows)
        lines += [f"## {title}", ""]
        if kind != "context":
            lines += [f"{held} of {len(rows)} hold.", ""]
        lines += ["| seed | claim | our command | our value | expected | note |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        lines += [_line(claim) for claim in rows]
        lines.append("")
    return "\n".join(lines)


def _line(claim: Claim) -> str:
    cells = (
        claim.seed,
        claim.text,
        claim.command,
        _shown(claim.value),
        f"{claim.expected} {claim.unit}",
        claim.note,
    )
    return "| " + " | ".join(cell(text) for text in cells) + " |"


def cell(text: str) -> str:
    """Return text escaped for a table."""
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def _shown(value: Value | None) -> str:
    """Return a value with four digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "holds" if value else "does not hold"
    if isinstance(value, tuple):
        return " / ".join(_shown(each) for each in value)
    if GROUPED[0] <= abs(value) < GROUPED[1] and value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
