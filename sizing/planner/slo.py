"""Does a forecast keep the promise?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.slo import SloSpec
    from sizing.planner.evidence import StepErrors
    from sizing.queueing.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit of the SLO: what it is on, the value forecast, the limit."""

    name: str
    seconds: float
    limit_s: float

    @property
    def ratio(self) -> float:
        """Above 1: missed."""
        return self.seconds / self.limit_s


def level(slo: SloSpec) -> float:
    """Return the share of requests that must stay below the limits."""
    return float(slo.percentile.removeprefix("p")) / 100


def checks(found: Forecast, slo: SloSpec) -> tuple[Check, ...]:
    """Compare a forecast with every limit of *slo*, at its percentile."""
    share = level(slo)
    limits = {
        "TTFT": (found.ttft, slo.ttft_s),
        "TPOT": (found.tpot, slo.tpot_s),
        "ITL": (found.itl, slo.itl_s),
    }
    return tuple(
        Check(name=f"{name} {slo.percentile}", seconds=spread.quantile(share), limit_s=limit)
        for name, (spread, limit) in limits.items()
        if limit is not None
    )


def tightest(found: Forecast, slo: SloSpec) -> Check:
    """Return the limit that is used up most."""
    return max(checks(found, slo), key=lambda check: check.ratio)


def under_load(found: Iterable[Check], errors: StepErrors) -> Check:
    """Return the limit that is used up most if latencies are off as those of loads were."""
    factors = {"TTFT": errors.ttft}
    late = (
        replace(check, seconds=check.seconds * factors.get(check.name[:4], errors.tpot))
        for check in found
    )
    return max(late, key=lambda check: check.ratio)


def meets(found: Forecast | None, slo: SloSpec) -> bool:
    """Say whether every limit holds; an overloaded pool keeps none."""
    return found is not None and tightest(found, slo).ratio <= 1
