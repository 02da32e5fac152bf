"""Evidence behind predictions: the shipped errors and residual quantiles."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING

from minicluster.config import parse
from minicluster.errors import InputError
from minicluster.specs.checks import STRICT
from sizing.catalog import configs, find_gpu
from sizing.evidence.coverage import Claim, Coverage
from sizing.evidence.interval import Cell, Intervals, fit_intervals
from sizing.evidence.residual import QUANTITIES, summarise
from sizing.evidence.validate import SliceErrors, residuals, slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sizing.evidence.coverage import Tried
    from sizing.evidence.validate import RowVerdict

FILE = "validation/evidence.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Rows of one kind of deployment, and the median errors of their predictions."""

    __pydantic_config__ = STRICT

    split: bool
    engine: str
    gpu: str
    weight_dtype: str
    rows: int
    ttft_median: float | None
    tpot_median: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """
    Figures of one run of `sizing validate`; no measured row is in it.

    Attributes:
        date: of the run.
        errors: by slice.
        coverage: of the intervals on rows left out of them.
        claims: how often one-sided bounds are right, likewise.
        cells: residual quantiles.
        support: predicted rows by kind of deployment.
    """

    __pydantic_config__ = STRICT

    date: str
    errors: tuple[SliceErrors, ...]
    coverage: tuple[Coverage, ...]
    claims: tuple[Claim, ...]
    cells: tuple[Cell, ...]
    support: tuple[Support, ...]

    @property
    def intervals(self) -> Intervals:
        """Return the cells by path."""
        return Intervals(cells={cell.path: cell for cell in self.cells})


@cache
def read_evidence() -> Evidence:
    """
    Read the shipped evidence; empty where none is shipped.

    Raises:
        InputError: a file that is not what `sizing validate --evidence` writes.

    """
    path = configs() / FILE
    if not path.exists():
        return Evidence(date="", errors=(), coverage=(), claims=(), cells=(), support=())
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            str(path), str(error), "what `sizing validate --evidence` writes"
        ) from None
    return parse(Evidence, raw, place=FILE)


def evidence_of(verdicts: Sequence[RowVerdict], found: Tried, *, date: str) -> Evidence:
    """Gather what a run shows; *found* of left-out configurations."""
    made = fit_intervals(residuals(verdicts))
    return Evidence(
        date=date,
        errors=slices(verdicts),
        coverage=found.coverages,
        claims=found.claims,
        cells=tuple(made.cells.values()),
        support=_support(verdicts),
    )


def _support(verdicts: Sequence[RowVerdict]) -> tuple[Support, ...]:
    groups: dict[tuple[bool, str, str, str], list[RowVerdict]] = {}
    for verdict in verdicts:
        row = verdict.row
        if row is not None and verdict.found.status == "predicted":
            gpu = find_gpu(row.gpu).name
            key = (len(row.groups) > 1, row.engine.lower(), gpu, row.weight_dtype)
            groups.setdefault(key, []).append(verdict)
    found = []
    for key in sorted(groups):
        split, engine, gpu, weight_dtype = key
        known = residuals(groups[key])
        ttft, tpot = (summarise(r.log_ratio for r in known if r.quantity == q) for q in QUANTITIES)
        found.append(
            Support(
                split=split,
                engine=engine,
                gpu=gpu,
                weight_dtype=weight_dtype,
                rows=len(groups[key]),
                ttft_median=None if ttft is None else ttft.median,
                tpot_median=None if tpot is None else tpot.median,
            )
        )
    return tuple(found)


def to_json(evidence: Evidence) -> str:
    """Write evidence so that equal figures give equal bytes; four digits are enough."""
    return json.dumps(_rounded(asdict(evidence)), indent=1, sort_keys=True) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
