"""The promise: which latency, at which percentile."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from minicluster.specs.checks import Positive, Spec, choice
from minicluster.stats.shares import LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PERCENTILES = ("mean", *LEVELS)  # statistics that are predicted, measured and reported everywhere
METRICS = ("ttft", "tpot", "itl", "e2e")  # latencies that may have a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSpec(Spec):
    """
    Upper limits, all judged at one percentile.

    Attributes:
        ttft_s: scheduled arrival to first content token.
        tpot_s: per request, (last - first) / (tokens - tokens in the first chunk).
        itl_s: every gap between content tokens; absent: not part of the promise.
        e2e_s: scheduled arrival to last token; absent: not part of the promise.
        percentile: share of requests that must stay below the limits: p50, p90, p95 or p99.
    """

    _TABLE: ClassVar[str] = "slo"

    ttft_s: Positive = 1.0
    tpot_s: Positive | None = 0.05
    itl_s: Positive | None = None
    e2e_s: Positive | None = None
    percentile: Annotated[str, choice(*LEVELS)] = "p99"

    @property
    def level(self) -> float:
        """Share of the requests that must stay below the limits."""
        return LEVELS[self.percentile]

    @property
    def limits_s(self) -> dict[str, float]:
        """Limits by metric, `ttft`, `tpot`, `itl` and `e2e`, without those that are not set."""
        limits = ((metric, getattr(self, f"{metric}_s")) for metric in METRICS)
        return {metric: limit_s for metric, limit_s in limits if limit_s is not None}

    @property
    def per_token_s(self) -> float | None:
        """Limit on the time that a token takes: the TPOT's, else the ITL's; `None`: neither."""
        return self.tpot_s or self.itl_s

    def longest_e2e_s(self, output_tokens: int) -> float:
        """Return the longest that an answer may take; without a limit on tokens 1 s is taken."""
        by_token_s = self.ttft_s + (output_tokens - 1) * (self.per_token_s or 1.0)
        return min(by_token_s, self.e2e_s or math.inf)


def loosest(slos: Iterable[SloSpec]) -> SloSpec:
    """Return what requests of every class keep: of each limit the largest; none if one has none."""
    every = tuple(slos)
    shared = [metric for metric in METRICS if all(metric in slo.limits_s for slo in every)]
    return _combined(every, shared, max, min(every, key=lambda slo: slo.level).percentile)


def strictest(slos: Iterable[SloSpec]) -> SloSpec:
    """Return what keeps the limits of every class: of each limit the smallest."""
    every = tuple(slos)
    return _combined(every, METRICS, min, max(every, key=lambda slo: slo.level).percentile)


def _combined(
    slos: Sequence[SloSpec], metrics: Sequence[str], choose: Callable[..., float], percentile: str
) -> SloSpec:
    limits: dict[str, Any] = dict.fromkeys((f"{metric}_s" for metric in METRICS), None)
    for metric in metrics:
        limits_s = [slo.limits_s[metric] for slo in slos if metric in slo.limits_s]
        limits[f"{metric}_s"] = choose(limits_s) if limits_s else None
    return SloSpec(**limits, percentile=percentile)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSlo(Spec):
    """
    `[workload.classes.slo]`: limits of one class of requests; those absent are the scenario's.

    Attributes:
        ttft_s: the class's own, in place of that of `[slo]`, like the keys below.
        tpot_s: likewise.
        itl_s: likewise; judged at the gaps of all classes, which share steps.
        e2e_s: likewise.
        percentile: share of the class's requests that must stay below its limits.
    """

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    itl_s: Positive | None = None
    e2e_s: Positive | None = None
    percentile: Annotated[str | None, choice(*LEVELS)] = None

    def over(self, slo: SloSpec) -> SloSpec:
        """Return *slo* with the limits that are set here."""
        own = {key.name: getattr(self, key.name) for key in fields(self)}
        return replace(slo, **{key: value for key, value in own.items() if value is not None})
