"""Latencies against the limits of the SLO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.units import seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.specs.slo import SloSpec
    from sizing.planner.error_model import StepErrors


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

    def with_errors(self, errors: StepErrors) -> Check:
        """Return the check of a latency that is as far off as those measured under load."""
        factor = errors.ttft if self.name.startswith("TTFT") else errors.tpot
        return replace(self, seconds=self.seconds * factor)


def missed_limits(slo: SloSpec, found_s: Mapping[str, float]) -> tuple[str, ...]:
    """Return the limits that latencies at the SLO's percentile exceed, one phrase each."""
    return tuple(
        f"{name.upper()} {slo.percentile} {seconds(found_s[name])}, limit {seconds(limit_s)}"
        for name, limit_s in slo.limits_s.items()
        if found_s.get(name, 0.0) > limit_s
    )
