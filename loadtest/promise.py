"""The SLO, metric by metric: promised, measured, kept or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.spread import LEVELS, quantile, samples_needed
from sizing.errors import InputError
from sizing.specs.slo import SloSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.samples import Sample

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
        conclusive: whether there are enough of them to say so.
    """

    metric: str
    limit_s: float
    percentile: str
    num: int
    num_missed: int
    measured_s: float | None
    kept: bool
    conclusive: bool


def judge(slo: SloSpec, answered: Sequence[Sample], num_unanswered: int) -> tuple[Promise, ...]:
    """
    Compare what was measured with every limit of *slo*.

    A request without a complete answer misses every limit. One whose tokens all came in one
    chunk has no TPOT, and keeps that limit.
    """
    promises = [_promise(slo, "ttft", slo.ttft_s, [s.ttft_s for s in answered], num_unanswered)]
    if slo.tpot_s is not None:
        tpots = [s.tpot_s or 0.0 for s in answered]
        promises.append(_promise(slo, "tpot", slo.tpot_s, tpots, num_unanswered))
    if slo.itl_s is not None:
        gaps = [gap for s in answered for gap in s.gaps_s]
        # An answer that never came misses as many gaps as answers have on average.
        lost = math.ceil(num_unanswered * max(1.0, len(gaps) / max(1, len(answered))))
        promises.append(_promise(slo, "itl", slo.itl_s, gaps, lost))
    return tuple(promises)


def _promise(
    slo: SloSpec, metric: str, limit_s: float, values: Sequence[float], num_lost: int
) -> Promise:
    num = len(values) + num_lost
    num_missed = num_lost + sum(value > limit_s for value in values)
    measured_s = quantile([*values, *[math.inf] * num_lost], LEVELS[slo.percentile])
    kept = num > 0 and measured_s <= limit_s
    return Promise(
        metric=metric,
        limit_s=limit_s,
        percentile=slo.percentile,
        num=num,
        num_missed=num_missed,
        measured_s=measured_s if math.isfinite(measured_s) else None,
        kept=kept,
        conclusive=_conclusive(slo.percentile, num, num_missed),
    )


def _conclusive(percentile: str, num: int, num_missed: int) -> bool:
    """Tell whether *num* is enough, or so many missed that more could not mend it."""
    needed = samples_needed(percentile)
    return num >= needed or num_missed > (1 - LEVELS[percentile]) * needed


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
