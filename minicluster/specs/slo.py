"""The promise: which latency, at which percentile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from minicluster.specs.checks import Positive, Spec, choice
from minicluster.stats.quantiles import LEVELS

PERCENTILES = ("mean", *LEVELS)
"""Statistics that are predicted, measured and reported everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSpec(Spec):
    """
    Upper limits, all judged at one percentile.

    Attributes:
        ttft_s: scheduled arrival to first content token.
        tpot_s: per request, (last - first) / (tokens - tokens in the first chunk).
        itl_s: every gap between content tokens; absent: not part of the promise.
        percentile: share of requests that must stay below the limits: p50, p90, p95 or p99.
    """

    _TABLE: ClassVar[str] = "slo"

    ttft_s: Positive = 1.0
    tpot_s: Positive | None = 0.05
    itl_s: Positive | None = None
    percentile: Annotated[str, choice(*LEVELS)] = "p99"

    @property
    def level(self) -> float:
        """Share of the requests that must stay below the limits."""
        return LEVELS[self.percentile]

    @property
    def limits_s(self) -> dict[str, float]:
        """Limits by metric, `ttft`, `tpot` and `itl`, without those that are not set."""
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.itl_s}
        return {metric: limit_s for metric, limit_s in limits.items() if limit_s is not None}

    @property
    def per_token_s(self) -> float | None:
        """Limit on the time that a token takes: the TPOT's, else the ITL's; `None`: neither."""
        return self.tpot_s or self.itl_s
