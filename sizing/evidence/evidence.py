"""Evidence behind predictions: errors, effects of groups, and intervals tried on other rows."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, product
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from minicluster.config import parse, read_json
from minicluster.specs.checks import Spec
from sizing.catalog import configs, find_gpu
from sizing.evidence.errors import SliceErrors, residuals, slices, summarise
from sizing.evidence.interval_fit import QUANTITIES, RowResidual, fit_intervals, folds
from sizing.planner.intervals import FILE, Intervals, Residuals, Support

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sizing.evidence.prediction import RowVerdict

FOLDS = 10
"""Parts into which configurations are divided, each of which is judged by the others."""
CONFIDENCES = (0.5, 0.8, 0.9, 0.95)
LIMITS_A_DECADE = 24
"""SLO limits per factor of ten at which claims are checked: neighbours differ by 10 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage(Spec):
    """
    Intervals tried.

    Attributes:
        source: of the rows; `all`: every one.
        covered_fraction: of them inside their interval.
        median_width: (high - low) / predicted.
    """

    source: str
    quantity: str
    rows: int
    covered_fraction: float
    median_width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Spec):
    """
    Claims "below this limit, with this confidence" tried, as the search makes them.

    Attributes:
        rows: claims: one a row, of the lowest limit that the bound is below.
        right_fraction: of them where the measurement is below the limit, too.
        bound_fraction: where it is below the bound itself: limits with no space between them.
    """

    source: str
    quantity: str
    confidence: float
    rows: int
    right_fraction: float
    bound_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Coverage of intervals and claims on configurations that were left out."""

    coverages: tuple[Coverage, ...]
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Residuals):
    """
    Figures of one run of `sizing validate`; no measured row is in it.

    Attributes:
        coverage: of the intervals on rows left out of them.
        claims: how often one-sided bounds are right, likewise.
        left_out: coverage of intervals on whole groups that were left out of them.
    """

    date: str
    errors: tuple[SliceErrors, ...]
    coverage: tuple[Coverage, ...]
    claims: tuple[Claim, ...]
    left_out: tuple[HeldOutCoverage, ...] = ()


@cache
def read_evidence() -> Evidence:
    """
    Read the shipped evidence; empty where none is shipped.

    Raises:
        InputError: a file that is not what `sizing validate --evidence` writes.
    """
    path = configs() / FILE
    if not path.exists():
        return Evidence(
            date="", errors=(), coverage=(), claims=(), groups=(), variances=(), support=()
        )
    raw = read_json(path, "what `sizing validate --evidence` writes")
    return parse(Evidence, raw, place=FILE)


def evidence_of(
    verdicts: Sequence[RowVerdict],
    found: Tried,
    *,
    date: str,
    left_out: Iterable[HeldOutCoverage] = (),
) -> Evidence:
    """Gather what a run shows; *found* of left-out configurations, *left_out* of whole groups."""
    made = fit_intervals(residuals(verdicts))
    return Evidence(
        date=date,
        errors=slices(verdicts),
        coverage=found.coverages,
        claims=found.claims,
        groups=made.groups,
        variances=made.variances,
        support=_support(verdicts),
        left_out=tuple(left_out),
    )


def _support(verdicts: Sequence[RowVerdict]) -> tuple[Support, ...]:
    groups: dict[tuple[bool, str, str, str], list[RowVerdict]] = defaultdict(list)
    for verdict in verdicts:
        row = verdict.row
        if row is not None and verdict.found.status == "predicted":
            gpu = find_gpu(row.gpu).name
            groups[len(row.groups) > 1, row.engine.lower(), gpu, row.weight_dtype].append(verdict)
    found = []
    for (split, engine, gpu, weight_dtype), members in sorted(groups.items(), key=itemgetter(0)):
        known = residuals(members)
        ttft, tpot = (summarise(r.log_ratio for r in known if r.quantity == q) for q in QUANTITIES)
        found.append(
            Support(
                split=split,
                engine=engine,
                gpu=gpu,
                weight_dtype=weight_dtype,
                rows=len(members),
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


def tried(residuals: Sequence[RowResidual]) -> Tried:
    """Cross-fit: every configuration is judged by intervals of the others."""
    inside: dict[tuple[str, str], list[tuple[bool, float]]] = defaultdict(list)
    right: dict[tuple[str, str, float], list[tuple[bool, bool]]] = defaultdict(list)
    parts = folds(residuals, FOLDS, lambda each: each.labels.configuration)
    held_out = chain.from_iterable(_tried_on(train, test) for train, test in parts)
    for made, each, is_inside, width in held_out:
        for source in ("all", each.source):
            inside[source, each.quantity].append((is_inside, width))
            for confidence, claim in _claims(made, each):
                right[source, each.quantity, confidence].append(claim)
    return Tried(
        coverages=tuple(
            Coverage(
                source=source,
                quantity=quantity,
                rows=len(hits),
                covered_fraction=float(np.mean([hit for hit, _ in hits])),
                median_width=float(np.median([width for _, width in hits])),
            )
            for (source, quantity), hits in sorted(inside.items())
        ),
        claims=tuple(
            Claim(
                source=source,
                quantity=quantity,
                confidence=confidence,
                rows=len(claims),
                right_fraction=float(np.mean([right_at for right_at, _ in claims])),
                bound_fraction=float(np.mean([bounded for _, bounded in claims])),
            )
            for (source, quantity, confidence), claims in sorted(right.items())
        ),
    )


def _claims(made: Intervals, each: RowResidual) -> Iterator[tuple[float, tuple[bool, bool]]]:
    """Yield whether the claim of each confidence is right: at the lowest limit, at the bound."""
    for confidence in CONFIDENCES:
        factor = made.bound(each.quantity, each.labels, confidence)
        if factor is not None:
            bound_s = factor * each.predicted_s
            limit_s = 10 ** (math.ceil(math.log10(bound_s) * LIMITS_A_DECADE) / LIMITS_A_DECADE)
            measured_s = each.predicted_s * math.exp(each.log_ratio)
            yield confidence, (measured_s <= limit_s, measured_s <= bound_s)


NAMES_OF: dict[str, Callable[[RowResidual], tuple[str, ...]]] = {
    "family": lambda each: (each.labels.family,),
    "engine": lambda each: (each.labels.engine,),
    "version": lambda each: (f"{each.labels.engine} {each.labels.version}".strip(),),
    "gpu": lambda each: (each.labels.gpu,),
    "generation": lambda each: (each.labels.generation,),
    "source": lambda each: (each.source,),
    "family+engine": lambda each: (each.labels.family, each.labels.engine),
    "family+generation": lambda each: (each.labels.family, each.labels.generation),
}
"""What a row is called, for each of `SPLITS` but `families`."""
KEPT_FAMILIES = (1, 2, 3)
"""Families of a kind of load that intervals are learned from, to be tried on its others."""
ORDER = ("all", "group", "class")
"""Sets of rows that have figures, in the order of the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutCoverage(Spec):
    """
    Intervals of one quantity around rows of groups that were left out of them.

    Attributes:
        split: of `SPLITS`.
        of: `all` rows, the `group` that was left out, or a `class` of rows over all groups.
        name: of the group or class.
        median_error: median of |predicted / measured - 1|; no constant of an interval is in it.
    """

    split: str
    of: str
    name: str
    quantity: str
    rows: int
    covered_fraction: float
    median_width: float
    median_error: float


def leave_out(residuals: Sequence[RowResidual], split: str) -> tuple[HeldOutCoverage, ...]:
    """
    Leave out each group of a split in turn, fit the intervals to the rest, and try them on it.

    Returns:
        Over all rows, then by group, then by class of rows; of `families` each group is a number of
        families that were kept. Groups that leave no row of a quantity to learn from are not tried.

    Ignores:
        Constants of step models: they are the same in every split (docs/validation.md names those
        that were chosen with rows in view).
    """
    tries: dict[tuple[str, str, str], list[tuple[bool, float, float]]] = defaultdict(list)
    parts = _few_families(residuals) if split == "families" else _without(residuals, split)
    for group, train, test in parts:
        for _, each, is_inside, width in _tried_on(train, test):
            error = abs(math.exp(-each.log_ratio) - 1)
            for of, name in (("all", "all"), ("group", group), ("class", each.row_class)):
                tries[of, name, each.quantity].append((is_inside, width, error))
    return tuple(
        HeldOutCoverage(
            split=split,
            of=of,
            name=name,
            quantity=quantity,
            rows=len(rows),
            covered_fraction=float(np.mean([inside for inside, _, _ in rows])),
            median_width=float(np.median([width for _, width, _ in rows])),
            median_error=float(np.median([error for *_, error in rows])),
        )
        for (of, name, quantity), rows in sorted(
            tries.items(), key=lambda each: (ORDER.index(each[0][0]), *each[0][1:])
        )
    )


Part = tuple[str, list[RowResidual], list[RowResidual]]
"""A name, rows to learn intervals from, and rows to try them on."""


def _without(residuals: Sequence[RowResidual], split: str) -> Iterator[Part]:
    """Yield what has every name of each group, and as much to learn from as has none of them."""
    names_of = NAMES_OF[split]
    for group in sorted({names_of(each) for each in residuals}):
        pairs = [(each, zip(names_of(each), group, strict=True)) for each in residuals]
        same = [(each, [own == other for own, other in names]) for each, names in pairs]
        train = [each for each, alike in same if not any(alike)]
        yield ", ".join(group), train, [each for each, alike in same if all(alike)]


def _few_families(residuals: Sequence[RowResidual]) -> Iterator[Part]:
    """Yield, by kind of load, neighbours in the list of families to learn from, and the others."""
    for kind in sorted({each.labels.kind for each in residuals}):
        families = sorted({each.labels.family for each in residuals if each.labels.kind == kind})
        for kept, first in product(KEPT_FAMILIES, range(len(families))):
            known = {families[(first + at) % len(families)] for at in range(kept)}
            test = [
                each
                for each in residuals
                if each.labels.kind == kind and each.labels.family not in known
            ]
            left_out = {id(each) for each in test}
            if test:
                yield str(kept), [each for each in residuals if id(each) not in left_out], test


def _tried_on(
    train: Sequence[RowResidual], test: Sequence[RowResidual]
) -> Iterator[tuple[Intervals, RowResidual, bool, float]]:
    made = fit_intervals(train)
    for each in test:
        found = made.around(1.0, each.quantity, each.labels)
        if found is not None:
            is_inside = found.low_s <= math.exp(each.log_ratio) <= found.high_s
            yield made, each, is_inside, found.high_s - found.low_s
