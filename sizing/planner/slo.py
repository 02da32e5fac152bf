"""Latencies against the limits of the SLO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.units import seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sizing.planner.error_model import StepErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """
    One limit of the SLO: the latency it limits, its value and the limit.

    Attributes:
        metric: `ttft`, `tpot`, `itl` or `e2e`.
        of: class of requests; empty where there are none.
    """

    metric: str
    percentile: str
    seconds: float
    limit_s: float
    of: str = ""

    @property
    def name(self) -> str:
        """Class, latency and percentile, such as `chat TTFT p99`."""
        return f"{self.of} {self.metric.upper()} {self.percentile}".strip()

    @property
    def ratio(self) -> float:
        """Value over limit: above 1 the limit is missed."""
        return self.seconds / self.limit_s

    def with_errors(self, errors: StepErrors) -> Check:
        """
        Return the check of a latency that is as far off as those measured under load.

        E2E, which is made of both, errs as much as the worse of TTFT and TPOT.
        """
        both = max(errors.ttft, errors.tpot)
        factor = {"ttft": errors.ttft, "e2e": both}.get(self.metric, errors.tpot)
        return replace(self, seconds=self.seconds * factor)


def missed_limits(checks: Iterable[Check]) -> tuple[str, ...]:
    """Return the limits that latencies exceed, one phrase each."""
    return tuple(
        f"{check.name} {seconds(check.seconds)}, limit {seconds(check.limit_s)}"
        for check in checks
        if check.seconds > check.limit_s
    )
