"""Scalars fitted on one half of the configurations, judged on the other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sizing.evidence.scalar import Scalars, corrected, fit_scalars, in_fitted_half
from sizing.evidence.validate import SliceErrors, slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sizing.evidence.verdict import RowVerdict

JUDGED = ("all", "source", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """
    What was fitted, and what it is worth.

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

    Args:
        verdicts: predictions of all rows.

    Returns:
        The fit with the errors of the other half, and all rows corrected.

    """
    fitted = [v for v in verdicts if v.row is not None and in_fitted_half(v.row)]
    scalars = fit_scalars(fitted)
    after = [corrected(verdict, scalars) for verdict in verdicts]
    other = [
        (old, new)
        for old, new in zip(verdicts, after, strict=True)
        if old.row is not None and not in_fitted_half(old.row)
    ]
    errors = {
        f"other half, {name}": tuple(
            each for each in slices([pair[i] for pair in other]) if each.by in JUDGED
        )
        for i, name in enumerate(("before", "after"))
    }
    return Calibrated(scalars=scalars, fitted_rows=len(fitted), errors=errors), after
