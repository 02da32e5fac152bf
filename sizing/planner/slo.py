"""Forecasts against the SLO: its limits, and the headroom in load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.plan import Headroom
from sizing.queueing.forecast import at_rate, capacity_requests_per_s, forecast, utilisations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.slo import SloSpec
    from sizing.planner.candidates import Candidate
    from sizing.planner.error_model import StepErrors
    from sizing.queueing.forecast import TandemForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit of the SLO: the latency it limits, its value and the limit."""

    name: str
    seconds: float
    limit_s: float

    @property
    def ratio(self) -> float:
        """Value over limit: above 1 the limit is missed."""
        return self.seconds / self.limit_s


def checks(found: TandemForecast, slo: SloSpec) -> tuple[Check, ...]:
    """Compare a forecast with every limit of *slo*, at its percentile."""
    share = slo.level
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


def tightest(found: TandemForecast, slo: SloSpec) -> Check:
    """Return the limit with the largest ratio."""
    return max(checks(found, slo), key=lambda check: check.ratio)


def tightest_with_errors(found: Iterable[Check], errors: StepErrors) -> Check:
    """Return the tightest limit if latencies are as far off as those measured under load."""
    factors = {"TTFT": errors.ttft}
    late = (
        replace(check, seconds=check.seconds * factors.get(check.name[:4], errors.tpot))
        for check in found
    )
    return max(late, key=lambda check: check.ratio)


def meets(found: TandemForecast | None, slo: SloSpec) -> bool:
    """Return whether every limit holds; a saturated pool holds none."""
    return found is not None and tightest(found, slo).ratio <= 1


HEADROOM_STEPS = 8
"""Halvings of the load factor: a 256th of the range between the planned load and saturation."""


def headroom(chosen: Candidate, slo: SloSpec) -> Headroom:
    """
    Bisect the largest load factor at which the SLO holds; below 1 only where it is missed at 1.

    The upper end is the rate at which the first pool saturates.
    """
    tandem = chosen.tandem
    rate = tandem.workload.requests_per_s
    low, high = 0.0, capacity_requests_per_s(tandem) / rate
    if meets(forecast(tandem), slo):
        low, high = 1.0, max(1.0, high)
    elif high > 1:
        high = 1.0
    for _ in range(HEADROOM_STEPS):
        middle = (low + high) / 2
        if meets(forecast(at_rate(tandem, middle * rate)), slo):
            low = middle
        else:
            high = middle
    broken = forecast(at_rate(tandem, high * rate))
    if broken is None or meets(broken, slo):
        shares = utilisations(tandem, 1.0, 1.0)
        busier = max(shares, key=lambda role: shares[role])
        return Headroom(load_factor=low, binds=f"{busier} saturates")
    check = tightest(broken, slo)
    now = forecast(tandem) if low >= 1 else None
    if check.name.startswith("TTFT"):
        before = now.parts_s if now else dict.fromkeys(broken.parts_s, 0.0)
        grown = max(broken.parts_s, key=lambda part: broken.parts_s[part] - before[part])
        return Headroom(load_factor=low, binds=f"{check.name}: {grown}")
    return Headroom(load_factor=low, binds=f"{check.name}: decode batch")
