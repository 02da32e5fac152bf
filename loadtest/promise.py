"""The SLO, metric by metric: promised, measured, kept or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadtest.confidence import (
    cautious,
    count_needed,
    design_effect,
    percentile_interval,
    samples_needed,
    share_interval,
)
from loadtest.spread import LEVELS, quantile
from sizing.errors import InputError
from sizing.specs.slo import SloSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadtest.samples import Sample

MOST = 0.5
"""A run too short to judge a percentile by still shows that most requests miss."""

EXAMPLE = "like ttft=1,tpot=0.05,percentile=p99 (seconds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """
    One limit of the SLO and how it fared.

    Attributes:
        num: requests that it covers (gaps, for ITL), those without an answer included.
        num_missed: of these, above the limit or without an answer.
        measured_s: the percentile over all of them, no answer counting as endless;
            `None`: the percentile itself is endless.
        measured_low_s, measured_high_s: its 95 % interval; `None`: open.
        attained_fraction: share of them within the limit.
        attained_low, attained_high: its 95 % interval.
        design_effect: how many of them say as much as one independent request.
        verdict: `kept` or `missed` if the interval of the share leaves the percentile out;
            `open` if it holds it, or if they are fewer than `samples_needed` and it is not most
            of them that missed.
        num_needed: how many it takes until neither is so, `None` where that is known already or
            the share is the percentile itself.
    """

    metric: str
    limit_s: float
    percentile: str
    num: int
    num_missed: int
    measured_s: float | None
    measured_low_s: float | None
    measured_high_s: float | None
    attained_fraction: float
    attained_low: float
    attained_high: float
    design_effect: float
    verdict: str
    num_needed: int | None


def judge(slo: SloSpec, requests: Sequence[Sample | None]) -> tuple[Promise, ...]:
    """
    Compare what was measured with every limit of *slo*.

    A request without a complete answer misses every limit. One whose tokens all came in one
    chunk has no TPOT, and keeps that limit.

    Args:
        slo: the limits.
        requests: of the window in the order of their arrival; `None`: never sent.
    """
    whole = [s if s is not None and s.ok else None for s in requests]
    ttft = np.array([math.inf if s is None else s.ttft_s for s in whole])
    promises = [judge_limit("ttft", ttft, limit_s=slo.ttft_s, percentile=slo.percentile)]
    if slo.tpot_s is not None:
        tpot = np.array([math.inf if s is None else s.tpot_s or 0.0 for s in whole])
        promises.append(judge_limit("tpot", tpot, limit_s=slo.tpot_s, percentile=slo.percentile))
    if slo.itl_s is not None:
        itl = _gaps(whole)
        promises.append(judge_limit("itl", itl, limit_s=slo.itl_s, percentile=slo.percentile))
    return tuple(promises)


def judge_limit(
    metric: str, values: NDArray[np.float64], *, limit_s: float, percentile: str
) -> Promise:
    """Judge one limit on *values* in the order of time, shape (n,); infinite: no answer."""
    level, count = LEVELS[percentile], len(values)
    missed = int((values > limit_s).sum())
    share = 1 - missed / count if count else 0.0
    seen = design_effect(values)
    effect = cautious(seen)
    attained = share_interval(share, max(1, count), effect)
    high = 1.0 if attained.high is None else attained.high
    verdict = _verdict(level, count, attained.low, high)
    measured_s = quantile(values.tolist(), level) if count else math.inf
    around = percentile_interval(values, level, effect) if count else None
    return Promise(
        metric=metric,
        limit_s=limit_s,
        percentile=percentile,
        num=count,
        num_missed=missed,
        measured_s=measured_s if math.isfinite(measured_s) else None,
        measured_low_s=around.low if around and math.isfinite(around.low) else None,
        measured_high_s=around.high if around else None,
        attained_fraction=share,
        attained_low=attained.low,
        attained_high=high,
        design_effect=seen,
        verdict=verdict,
        num_needed=_needed(share, level, effect) if verdict == "open" else None,
    )


def _verdict(level: float, count: int, low: float, high: float) -> str:
    """Say what an interval proves about a share *level*."""
    if count < samples_needed(level):
        return "missed" if high < min(level, MOST) else "open"
    return "kept" if low >= level else "missed" if high < level else "open"


def _needed(share: float, level: float, effect: float) -> int | None:
    """How many values it takes to judge *level*; `None`: no number does."""
    enough = count_needed(share, level, effect)
    return None if enough is None else max(enough, samples_needed(level))


def _gaps(whole: Sequence[Sample | None]) -> NDArray[np.float64]:
    """All gaps; an answer that never came misses as many as answers have on average."""
    answered = [s for s in whole if s is not None]
    lost = max(1, math.ceil(sum(len(s.gaps_s) for s in answered) / max(1, len(answered))))
    return np.array([gap for s in whole for gap in (s.gaps_s if s else (math.inf,) * lost)])


def count_good(slo: SloSpec, answered: Sequence[Sample]) -> int:
    """Count the answers that met every limit of *slo*."""
    return sum(
        s.ttft_s <= slo.ttft_s
        and (slo.tpot_s is None or (s.tpot_s or 0.0) <= slo.tpot_s)
        and (slo.itl_s is None or max(s.gaps_s, default=0.0) <= slo.itl_s)
        for s in answered
    )


def parse_slo(text: str) -> SloSpec:
    """
    Read an SLO as it is given on the command line.

    Raises:
        InputError: not of the form, or with limits that make no sense.

    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() not in {"ttft", "tpot", "itl", "percentile"}:
            raise InputError("--slo", part, f"key=value pairs {EXAMPLE}")
        given[key.strip()] = value.strip()
    if "ttft" not in given:
        raise InputError("--slo", text, f"a ttft, {EXAMPLE}")
    try:
        limits = {f"{k}_s": float(v) for k, v in given.items() if k != "percentile"}
    except ValueError:
        raise InputError("--slo", text, f"seconds as numbers, {EXAMPLE}") from None
    limits.setdefault("tpot_s", None)  # type: ignore[arg-type]  # not promised unless named
    return SloSpec(**limits, percentile=given.get("percentile", "p99"))
