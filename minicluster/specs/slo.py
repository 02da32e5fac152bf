"""The promise: which latency, at which percentile."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from minicluster.specs.checks import Positive, Spec, choice
from minicluster.stats.quantiles import LEVELS

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        limits = {
            "ttft": self.ttft_s,
            "tpot": self.tpot_s,
            "itl": self.itl_s,
            "e2e": self.e2e_s,
        }
        return {metric: limit_s for metric, limit_s in limits.items() if limit_s is not None}

    @property
    def per_token_s(self) -> float | None:
        """Limit on the time that a token takes: the TPOT's, else the ITL's; `None`: neither."""
        return self.tpot_s or self.itl_s


def loosest(slos: Iterable[SloSpec]) -> SloSpec:
    """Return what requests of every class keep: of each limit the largest; none if one has none."""
    first, *others = slos
    for slo in others:
        first = SloSpec(
            ttft_s=max(first.ttft_s, slo.ttft_s),
            tpot_s=_larger(first.tpot_s, slo.tpot_s),
            itl_s=_larger(first.itl_s, slo.itl_s),
            e2e_s=_larger(first.e2e_s, slo.e2e_s),
            percentile=min(first.percentile, slo.percentile, key=lambda name: LEVELS[name]),
        )
    return first


def strictest(slos: Iterable[SloSpec]) -> SloSpec:
    """Return what keeps the limits of every class: of each limit the smallest."""
    first, *others = slos
    for slo in others:
        first = SloSpec(
            ttft_s=min(first.ttft_s, slo.ttft_s),
            tpot_s=_smaller(first.tpot_s, slo.tpot_s),
            itl_s=_smaller(first.itl_s, slo.itl_s),
            e2e_s=_smaller(first.e2e_s, slo.e2e_s),
            percentile=max(first.percentile, slo.percentile, key=lambda name: LEVELS[name]),
        )
    return first


def _larger(one_s: float | None, two_s: float | None) -> float | None:
    return None if one_s is None or two_s is None else max(one_s, two_s)


def _smaller(one_s: float | None, two_s: float | None) -> float | None:
    return min((each for each in (one_s, two_s) if each is not None), default=None)


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
