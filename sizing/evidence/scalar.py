"""Scalars that bring predictions to measured rows: fitted on one half, judged on the other."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sizing.evidence.interval import QUANTITIES, grouped
from sizing.evidence.row import kind_of
from sizing.evidence.validate import SliceErrors, slices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from sizing.evidence.row import MeasuredRow
    from sizing.evidence.validate import RowVerdict


PRIOR_ROWS = 8.0
"""Rows of its own at which a group weighs as much as its parent."""
ROWS_OF_CONFIGURATION = 2.0
"""Largest weight of all rows of one configuration together, because they err alike."""
ROUNDS = 20
HUBER = 0.15
"""Relative errors beyond this count by their size, not by its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """
    Correction of one group of rows.

        TTFT' = prefill TTFT + request_s,  TPOT' = decode TPOT + L per_layer_s

    Attributes:
        group: load, engine, GPU, weight dtype and TP, from coarse to fine.
        rows: measurements that it was fitted on.
    """

    group: tuple[str, ...]
    rows: int
    prefill: float
    request_s: float
    decode: float
    per_layer_s: float


NONE = Scalars(group=(), rows=0, prefill=1.0, request_s=0.0, decode=1.0, per_layer_s=0.0)


def in_fitted_half(row: MeasuredRow) -> bool:
    """Say whether a row's configuration is fitted on, with all its loads; else it is judged."""
    digest = hashlib.sha256(row.configuration.encode()).digest()
    return int.from_bytes(digest[:8]) % 2 == 0


def group_of(row: MeasuredRow) -> tuple[str, ...]:
    """Labels of the group whose scalars a row gets."""
    tp = row.groups[-1].slicing.tp
    return (kind_of(row), row.engine.lower(), row.gpu, row.weight_dtype, f"TP {tp}")


def fit_scalars(verdicts: Iterable[RowVerdict]) -> dict[tuple[str, ...], Scalars]:
    """
    Fit scalars of every group (docs/model.md, eq. V6).

        minimise sum over rows of rho(predicted' / measured - 1)
            + k (theta - theta_parent)^2,  rho of Huber, k = 8 rows,
            the rows of one configuration weighing 2 together at most

    The root group `()` is always there.

    Source: hierarchical shrinkage; robust regression after Huber.

    Ignores that slower steps lengthen queues more than in proportion.
    """
    known = (each for each in verdicts if each.found.status == "predicted")
    members = grouped(known, lambda each: () if each.row is None else group_of(each.row))
    fitted: dict[tuple[str, ...], Scalars] = {(): NONE}
    for labels, rows in members.items():
        parent = fitted[labels[:-1]]
        if len(rows) == len(members.get(labels[:-1], ())):
            fitted[labels] = replace(parent, group=labels)  # the same rows under a longer name
        else:
            fitted[labels] = _fit_group(labels, rows, parent)
    return fitted


def corrected(verdict: RowVerdict, scalars: Mapping[tuple[str, ...], Scalars]) -> RowVerdict:
    """Apply the scalars of the finest group that was fitted; intervals move along."""
    row, found = verdict.row, verdict.found
    if row is None or found.status != "predicted":
        return verdict
    labels = group_of(row)
    depth = next(d for d in range(len(labels), -1, -1) if labels[:d] in scalars)
    s = scalars[labels[:depth]]
    terms = {
        "ttft": (s.prefill, s.request_s),
        "tpot": (s.decode, s.per_layer_s * found.num_layers),
    }

    def moved(quantity: str, value_s: float | None) -> float | None:
        factor, offset_s = terms[quantity]
        return None if value_s is None else factor * value_s + offset_s

    better = replace(
        found,
        ttft_s=moved("ttft", found.ttft_s),
        tpot_s=moved("tpot", found.tpot_s),
        ttft_p99_s=moved("ttft", found.ttft_p99_s),
        tpot_p99_s=moved("tpot", found.tpot_p99_s),
    )
    intervals = {}
    for quantity in QUANTITIES:
        around = getattr(verdict, quantity)
        old, new = (getattr(each, f"{quantity}_s") for each in (found, better))
        if around is not None and old and new:
            ends = {"low_s": around.low_s * new / old, "high_s": around.high_s * new / old}
            intervals[quantity] = replace(around, **ends)
    return replace(verdict, found=better, **intervals)


def _fit_group(labels: tuple[str, ...], rows: Sequence[RowVerdict], parent: Scalars) -> Scalars:
    prefill, request_s = _fit(rows, "ttft", (parent.prefill, parent.request_s))
    decode, per_layer_s = _fit(rows, "tpot", (parent.decode, parent.per_layer_s))
    return Scalars(
        group=labels,
        rows=len(rows),
        prefill=prefill,
        request_s=request_s,
        decode=decode,
        per_layer_s=per_layer_s,
    )


def _fit(
    rows: Sequence[RowVerdict], quantity: str, prior: tuple[float, float]
) -> tuple[float, float]:
    """Return factor and offset of one quantity; *prior* where no row measured it."""
    counts = Counter(each.row.configuration for each in rows if each.row is not None)
    data = []
    for each in rows:
        predicted, measured = (getattr(on, f"{quantity}_s") for on in (each.found, each.row))
        if each.row is not None and predicted and measured:
            unit = 1.0 if quantity == "ttft" else each.found.num_layers
            share = min(1.0, ROWS_OF_CONFIGURATION / counts[each.row.configuration])
            data.append((predicted, measured, unit, share))
    return _line(np.array(data), prior) if data else prior


def _line(data: NDArray[np.float64], prior: tuple[float, float]) -> tuple[float, float]:
    """Factor and offset of predictions, robust and shrunk; the offset is not negative."""
    predicted, measured, unit, share = data.T
    x = np.stack([predicted / measured, unit / measured], axis=1)
    scale = np.array([1.0, 1.0 / max(float(np.median(x[:, 1])), 1e-12)])
    x = x * scale
    start = np.array(prior) / scale
    theta = start
    for _ in range(ROUNDS):
        weight = share * np.minimum(1.0, HUBER / np.maximum(np.abs(x @ theta - 1), 1e-9))
        normal = (x * weight[:, None]).T @ x + PRIOR_ROWS * np.eye(2)
        theta = np.linalg.solve(normal, (x * weight[:, None]).sum(axis=0) + PRIOR_ROWS * start)
        if theta[1] < 0:
            alone = weight * x[:, 0]
            factor = (alone.sum() + PRIOR_ROWS * start[0]) / (alone @ x[:, 0] + PRIOR_ROWS)
            theta = np.array([factor, 0.0])
    factor, offset = theta * scale
    return float(factor), float(offset)


JUDGED = ("all", "source", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """
    Fitted scalars, and the errors with and without them on the other half.

    Attributes:
        scalars: by group.
        fitted_rows: rows of the half that was fitted on.
        errors: of the other half, `before` and `after`, by source and load.
    """

    scalars: dict[tuple[str, ...], Scalars]
    fitted_rows: int
    errors: dict[str, tuple[SliceErrors, ...]]

    def data(self) -> dict[str, object]:
        """Return everything as plain data."""
        return {
            "fitted_rows": self.fitted_rows,
            "scalars": [asdict(each) for each in self.scalars.values()],
            "other_half": {
                name: [asdict(each) for each in found] for name, found in self.errors.items()
            },
        }


def calibrated(verdicts: Sequence[RowVerdict]) -> tuple[Calibrated, list[RowVerdict]]:
    """
    Fit on the half of the configurations that `in_fitted_half` names.

    Returns:
        The fit with the errors of the other half, and all rows corrected.
    """
    scored = [v for v in verdicts if v.row is not None and not v.excluded]
    fitted = [v for v in scored if v.row is not None and in_fitted_half(v.row)]
    scalars = fit_scalars(fitted)
    after = [corrected(verdict, scalars) for verdict in verdicts]
    other = [
        (old, new)
        for old, new in zip(verdicts, after, strict=True)
        if old.row is not None and not old.excluded and not in_fitted_half(old.row)
    ]
    errors = {
        f"other half, {name}": tuple(
            each for each in slices([pair[i] for pair in other]) if each.by in JUDGED
        )
        for i, name in enumerate(("before", "after"))
    }
    return Calibrated(scalars=scalars, fitted_rows=len(fitted), errors=errors), after
