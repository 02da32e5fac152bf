"""The SLO, metric by metric: promised, measured, kept or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.slo import SloSpec
from minicluster.stats.confidence import (
    count_needed,
    design_effect,
    percentile_interval,
    samples_needed,
    share_interval,
)
from minicluster.stats.quantiles import LEVELS, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from minicluster.workload.samples import Sample

MOST = 0.5
"""A run too short to judge a percentile by still shows that most requests miss."""

EXAMPLE = "like ttft=1,tpot=0.05,percentile=p99 (seconds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SloResult:
    """
    One limit of the SLO and how it fared.

    Attributes:
        num: values that it covers, one a request (ITL: one a gap), lost ones included.
        num_requests: they come from so many requests.
        num_missed: of these, above the limit or without an answer.
        measured_s: the percentile over all of them, no answer counting as endless;
            `None`: the percentile itself is endless.
        measured_low_s, measured_high_s: its 95 % interval; `None`: open.
        attained_fraction: share of them within the limit.
        attained_low, attained_high: its 95 % interval.
        design_effect: how many of them say as much as one independent request.
        verdict: `kept` or `missed` if the interval of the share leaves the percentile out;
            `open` if it holds it, or if the requests are fewer than `samples_needed` and it is not
            most of the values that missed.
        num_needed: how many requests it takes until neither is so, `None` where that is known
            already or the share is the percentile itself.
    """

    metric: str
    limit_s: float
    percentile: str
    num: int
    num_requests: int
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


def judge(slo: SloSpec, requests: Sequence[Sample | None]) -> tuple[SloResult, ...]:
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
        promises.append(
            judge_limit(
                "itl",
                _gaps(requests),
                limit_s=slo.itl_s,
                percentile=slo.percentile,
                num_requests=len(whole),
            )
        )
    return tuple(promises)


def judge_limit(
    metric: str,
    values: NDArray[np.float64],
    *,
    limit_s: float,
    percentile: str,
    num_requests: int | None = None,
) -> SloResult:
    """
    Judge one limit.

    Args:
        metric: its name.
        values: in the order of time, infinite where there is no answer, shape (n,).
        limit_s: that they are to keep.
        percentile: how many of them, `p99` and the like.
        num_requests: that *values* come from; `None`: one each.
    """
    requests = len(values) if num_requests is None else num_requests
    level, count = LEVELS[percentile], len(values)
    missed = int((values > limit_s).sum())
    share = 1 - missed / count if count else 0.0
    found = design_effect(values)
    effect = found.reckoned
    attained = share_interval(share, max(1, count), effect)
    high = 1.0 if attained.high is None else attained.high
    verdict = proven(level, requests, attained.low, high)
    enough = count_needed(share, level, effect) if verdict == "open" else None
    each = count / max(1, requests)
    measured_s = quantile(values.tolist(), level) if count else math.inf
    around = percentile_interval(values, level, effect) if count else None
    return SloResult(
        metric=metric,
        limit_s=limit_s,
        percentile=percentile,
        num=count,
        num_requests=requests,
        num_missed=missed,
        measured_s=measured_s if math.isfinite(measured_s) else None,
        measured_low_s=around.low if around and math.isfinite(around.low) else None,
        measured_high_s=around.high if around else None,
        attained_fraction=share,
        attained_low=attained.low,
        attained_high=high,
        design_effect=found.seen,
        verdict=verdict,
        num_needed=enough and max(math.ceil(enough / (each or 1)), samples_needed(level)),
    )


def proven(level: float, requests: int, low: float, high: float) -> str:
    """Say what an interval proves about a share *level*: kept, missed, or neither (open)."""
    if requests < samples_needed(level):
        return "missed" if high < min(level, MOST) else "open"
    return "kept" if low >= level else "missed" if high < level else "open"


def _gaps(requests: Sequence[Sample | None]) -> NDArray[np.float64]:
    """
    All gaps in the order in which they ended, for what stalls one stream stalls those beside it.

    An answer that never came misses as many as answers have on average, when it was due.
    """
    answered = [s for s in requests if s is not None and s.ok]
    lost = max(1, math.ceil(sum(len(s.gaps_s) for s in answered) / max(1, len(answered))))
    seen: list[tuple[float, float]] = []
    due_s = 0.0
    for sample in requests:
        due_s = due_s if sample is None else sample.due_s
        if sample is None or not sample.ok:
            seen += [(due_s, math.inf)] * lost
        else:
            seen += zip(sample.gap_ends_s, sample.gaps_s, strict=True)
    return np.array([gap for _, gap in sorted(seen, key=lambda pair: pair[0])])


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
