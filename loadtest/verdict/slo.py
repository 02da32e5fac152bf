"""Each limit of the SLO: measured percentile, attained fraction, and what they prove."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.slo import METRICS, SloSpec
from minicluster.stats.confidence import design_effect, percentile_interval
from minicluster.stats.quantiles import quantile
from minicluster.stats.shares import LEVELS, count_needed, samples_needed, share_interval
from minicluster.units import seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from loadtest.run.folder import Promise
    from loadtest.verdict.resimulation import PredictedRequest
    from minicluster.workload.samples import Sample

FEWEST_MISSES = 2
"""Values beyond a limit that prove a miss, if the interval says so: one of ten may be chance, for
which Wilson's interval of so few is too short."""

EXAMPLE = "like ttft=1,tpot=0.05,percentile=p99 (seconds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SloResult:
    """
    The measurement of one limit of the SLO.

    Attributes:
        of: class of requests; empty where there are none.
        num: number of values, one per request (ITL: one per gap), those without an answer included.
        measured_s: the percentile, where no answer counts as infinite; `None`: it is infinite.
        measured_low_s, measured_high_s: its 95 % interval; `None`: unbounded.
        attained_fraction: fraction of the values within the limit; its 95 % interval is from
            `attained_low` to `attained_high`.
        design_effect: number of values that carry as much information as one independent value.
        verdict: `met` or `missed` if the interval of the attained fraction excludes the
            percentile; `inconclusive` if it contains it, or lies above it with fewer requests
            than `samples_needed`, or below it by a single miss.
        num_needed: number of requests that would decide; `None` if decided already, or if the
            attained fraction equals the percentile.
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
    of: str = ""

    @property
    def name(self) -> str:
        """The limit's class, metric and percentile, such as `chat TTFT p99`."""
        return f"{self.of} {self.metric.upper()} {self.percentile}".strip()

    @property
    def attained_text(self) -> str:
        """The attained fraction with its interval, and the effective sample size behind it."""
        kind = " gaps" if self.metric == "itl" else ""
        return (
            f"{self.name}: {self.attained_fraction:.2%} of {self.num}{kind} within "
            f"{seconds(self.limit_s)} (95 % interval {self.attained_low:.2%} to "
            f"{self.attained_high:.2%}; design effect {self.design_effect:.1f}, "
            f"effective n = {self.num / self.design_effect:.0f})"
        )


def judge(slo: SloSpec, requests: Sequence[Sample | None]) -> tuple[SloResult, ...]:
    """
    Compare the measurement with every limit of *slo*.

    A request without a complete answer misses every limit. A request whose tokens all came in one
    chunk has no TPOT and meets that limit. A request that was in flight when the run was cut short
    misses the limits that it was already beyond, and says nothing of the others (`late`).

    *requests* are those of the window in the order of their arrival; `None`: never sent.

    Ignores: Of the requests that arrived less than a limit before the end, the quick ones count and
    the slow ones do not: so many of so short a time that its share is a little too high.
    """
    results = []
    for metric, limit_s in slo.limits_s.items():
        decided = [s for s in requests if not _in_flight(s) or late(s, metric, limit_s)]
        values = _gaps(decided) if metric == "itl" else _latencies(metric, decided)
        results.append(
            judge_limit(
                metric,
                values,
                limit_s=limit_s,
                percentile=slo.percentile,
                num_requests=len(decided),
            )
        )
    return tuple(results)


def undecided(slo: SloSpec, request: Sample | None) -> bool:
    """Whether *request* was in flight at the end of the run, and within every limit so far."""
    limits = slo.limits_s.items()
    return _in_flight(request) and not any(late(request, *limit) for limit in limits)


def late(request: Sample | None, metric: str, limit_s: float) -> bool:
    """
    Whether a request without its end is beyond a limit already, whatever comes next.

    TTFT and E2E: since it was due; TPOT: if the tokens that it still lacked came at once; ITL: its
    longest gap so far, that since its last token included.
    """
    if request is None:
        return True
    first, end_s, due_s = request.chunk_s[:1], request.end_s, request.due_s
    if metric == "e2e":
        return end_s - due_s > limit_s
    if metric == "ttft":
        return (*first, end_s)[0] - due_s > limit_s
    if not first:
        return False
    if metric == "tpot":
        after_first = request.asked_output_tokens - (request.chunk_tokens or (1,))[0]
        return end_s - first[0] > limit_s * max(1, after_first)
    return max(request.longest_stall_s, end_s - request.chunk_s[-1]) > limit_s


def _in_flight(request: Sample | None) -> bool:
    return request is not None and request.outcome == "unfinished"


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
        values: in the order of time, infinite where there is no answer, shape (n,).
        num_requests: number of requests that *values* come from; `None`: one value per request.
    """
    requests = len(values) if num_requests is None else num_requests
    level, count = LEVELS[percentile], len(values)
    missed = int((values > limit_s).sum())
    attained = 1 - missed / count if count else 0.0
    effect = design_effect(values)
    interval = share_interval(attained, max(1, count), effect.adjusted)
    verdict = limit_verdict(level, requests, interval.low, interval.high)
    if verdict == "missed" and missed < FEWEST_MISSES:
        verdict = "inconclusive"
    unclear = verdict == "inconclusive"
    values_needed = count_needed(attained, level, effect.adjusted) if unclear else None
    per_request = count / max(1, requests) or 1
    measured_s = quantile(values.tolist(), level) if count else math.inf
    measured = percentile_interval(values, level, effect.adjusted) if count else None
    return SloResult(
        metric=metric,
        limit_s=limit_s,
        percentile=percentile,
        num=count,
        num_requests=requests,
        num_missed=missed,
        measured_s=measured_s if math.isfinite(measured_s) else None,
        measured_low_s=measured.low if measured and math.isfinite(measured.low) else None,
        measured_high_s=measured.high if measured and math.isfinite(measured.high) else None,
        attained_fraction=attained,
        attained_low=interval.low,
        attained_high=interval.high,
        design_effect=effect.estimate,
        verdict=verdict,
        num_needed=values_needed
        and max(math.ceil(values_needed / per_request), samples_needed(level)),
    )


def limit_verdict(level: float, requests: int, low: float, high: float) -> str:
    """Return what the interval of an attained fraction proves: met, missed or inconclusive."""
    if high < level:
        return "missed"
    return "met" if low >= level and requests >= samples_needed(level) else "inconclusive"


def _latencies(metric: str, requests: Sequence[Sample | None]) -> NDArray[np.float64]:
    whole = [s if s is not None and s.ok else None for s in requests]
    return np.array([getattr(s, f"{metric}_s") or 0.0 if s else math.inf for s in whole])


def _gaps(requests: Sequence[Sample | None]) -> NDArray[np.float64]:
    """
    Return all gaps in the order in which they ended, because concurrent streams stall together.

    A missing answer counts as the mean number of gaps, all infinite, at the time it was due.
    """
    answered = [s for s in requests if s is not None and s.ok]
    lost = max(1, math.ceil(sum(len(s.gaps_s) for s in answered) / max(1, len(answered))))
    gaps: list[tuple[float, float]] = []
    due_s = 0.0
    for sample in requests:
        due_s = due_s if sample is None else sample.due_s
        if sample is None or not sample.ok:
            gaps += [(due_s, math.inf)] * lost
        else:
            gaps += zip(sample.gap_ends_s, sample.gaps_s, strict=True)
    return np.array([gap for _, gap in sorted(gaps, key=lambda pair: pair[0])])


def good(
    promises: Iterable[Promise], answered: Mapping[int, Sample | PredictedRequest]
) -> frozenset[int]:
    """Return the answers, measured or simulated, that met every limit of their class (goodput)."""
    return frozenset(
        index
        for _, slo, own in promises
        for index, answer in answered.items()
        if index in own and _is_good(slo, answer)
    )


def _is_good(slo: SloSpec, answer: Sample | PredictedRequest) -> bool:
    return (
        answer.ttft_s <= slo.ttft_s
        and (slo.tpot_s is None or (answer.tpot_s or 0.0) <= slo.tpot_s)
        and (slo.itl_s is None or answer.longest_stall_s <= slo.itl_s)
        and (slo.e2e_s is None or answer.e2e_s <= slo.e2e_s)
    )


def parse_slo(text: str) -> SloSpec:
    """
    Parse an SLO of the command line, such as `ttft=1,tpot=0.05,percentile=p99`.

    Raises InputError: another form, or a limit that is not positive.
    """
    fields: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() not in {*METRICS, "percentile"}:
            raise InputError("--slo", part, f"key=value pairs {EXAMPLE}")
        fields[key.strip()] = value.strip()
    if "ttft" not in fields:
        raise InputError("--slo", text, f"a ttft, {EXAMPLE}")
    try:
        limits = {f"{k}_s": float(v) for k, v in fields.items() if k != "percentile"}
    except ValueError:
        raise InputError("--slo", text, f"seconds as numbers, {EXAMPLE}") from None
    limits.setdefault("tpot_s", None)  # type: ignore[arg-type]  # no limit unless named
    return SloSpec(**limits, percentile=fields.get("percentile", "p99"))
