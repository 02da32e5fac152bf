"""How much more load the same pools take, and what breaks first beyond it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.plan import Headroom
from sizing.planner.slo import meets, tightest
from sizing.queueing.forecast import at_rate, capacity_requests_per_s, forecast, utilisations

if TYPE_CHECKING:
    from minicluster.specs.slo import SloSpec
    from sizing.planner.candidate import Candidate

STEPS = 8
"""Halvings of the load factor: a 256th of the range between the plan and saturation."""


def headroom(chosen: Candidate, slo: SloSpec) -> Headroom:
    """
    Bisect the largest load factor at which the SLO holds; below 1 only where it does not now.

    The upper end is the rate at which the first pool saturates.
    """
    tandem = chosen.tandem
    rate = tandem.workload.requests_per_s
    low, high = 0.0, capacity_requests_per_s(tandem) / rate
    if meets(forecast(tandem), slo):
        low, high = 1.0, max(1.0, high)
    elif high > 1:
        high = 1.0
    for _ in range(STEPS):
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
