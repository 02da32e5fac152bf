"""
How often the verdict's 95 % interval holds the truth, on queues whose truth is known.

M/G/k with 40 servers, lognormal service; a request's TTFT is its wait and the first seventh of
its service. Each run starts empty, is cut and judged as `loadtest` does it, against limits that
are kept or missed by a little and by a lot. Run: `python benchmarks/verdict_coverage.py [RUNS]`.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadtest.promise import judge_limit
from loadtest.spread import LEVELS
from loadtest.warmup import settled_from

if TYPE_CHECKING:
    from numpy.typing import NDArray

SERVERS = 40
SERVICE_S = 1.46
SERVICE_SIGMA = 0.3
FIRST_SHARE = 0.14
WARMUP_S = 20 * SERVICE_S
TARGET = "p99"
TRUTHS = (0.9, 0.97, 0.998, 0.9995)
"""Shares of requests that keep each limit in the long run, where p99 asks for 0.99."""

LIMITS_S = {
    0.5: (0.28703, 0.34361, 0.46339, 0.52393),
    0.75: (0.29813, 0.36813, 0.55667, 0.66068),
    0.88: (0.44626, 0.64391, 1.07278, 1.30813),
}
"""TTFT within which `TRUTHS` lie, by utilisation: quantiles of 32 million requests each."""

MINUTES = (2, 5, 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """
    Runs of one utilisation and length.

    Attributes:
        verdicts: asked for.
        judged: of these, PASS or FAIL.
        held: of these, with the truth in the interval.
        wrong: of these, against the truth.
        error: standard error of `coverage`; the verdicts of one run go together.
    """

    utilisation: float
    minutes: float
    verdicts: int
    judged: int
    held: int
    wrong: int
    error: float

    @property
    def coverage(self) -> float:
        """Share of the intervals behind a verdict that hold the truth."""
        return self.held / self.judged if self.judged else math.nan


def ttft_s(rng: np.random.Generator, utilisation: float, duration_s: float) -> NDArray[np.float64]:
    """Return arrivals and TTFTs of a queue that starts empty, shape (2, n)."""
    rate = SERVERS * utilisation / SERVICE_S
    count = rng.poisson(rate * duration_s)
    due = np.sort(rng.uniform(0, duration_s, count))
    mu = math.log(SERVICE_S) - SERVICE_SIGMA**2 / 2
    service = rng.lognormal(mu, SERVICE_SIGMA, count)
    free = [0.0] * SERVERS
    wait = np.empty(count)
    for k, (at, takes) in enumerate(zip(due.tolist(), service.tolist(), strict=True)):
        begins = max(free[0], at)
        heapq.heapreplace(free, begins + takes)
        wait[k] = begins - at
    return np.stack([due, wait + FIRST_SHARE * service])


def measure(utilisation: float, minutes: float, runs: int) -> Cell:
    """Judge *runs* runs against limits that the share `TRUTHS` of requests keeps."""
    judged, held, wrong = np.zeros((3, runs), dtype=np.int64)
    for run in range(runs):
        rng = np.random.default_rng([round(100 * utilisation), round(60 * minutes), run])
        due, values = ttft_s(rng, utilisation, WARMUP_S + 60 * minutes)
        start = max(int(np.searchsorted(due, WARMUP_S)), settled_from(values)[0])
        for share, limit in zip(TRUTHS, LIMITS_S[utilisation], strict=True):
            found = judge_limit("ttft", values[start:], limit_s=limit, percentile=TARGET)
            if found.verdict == "open":
                continue
            judged[run] += 1
            held[run] += found.attained_low <= share <= found.attained_high
            wrong[run] += (found.verdict == "kept") != (share > LEVELS[TARGET])
    total = max(1, int(judged.sum()))
    beside = held - judged * held.sum() / total
    return Cell(
        utilisation=utilisation,
        minutes=minutes,
        verdicts=runs * len(TRUTHS),
        judged=int(judged.sum()),
        held=int(held.sum()),
        wrong=int(wrong.sum()),
        error=float(np.sqrt(beside @ beside)) / total,
    )


def main(runs: int) -> None:
    """Print a row for each utilisation and length, and all together."""
    print(f"M/G/{SERVERS}, {runs} runs each, verdicts on {TARGET} at {len(TRUTHS)} limits")
    print("load  minutes  PASS or FAIL  inconclusive  interval holds (s.e.)  wrong verdicts")
    cells = []
    for utilisation in LIMITS_S:
        for minutes in MINUTES:
            cell = measure(utilisation, minutes, runs)
            cells.append(cell)
            share = cell.judged / cell.verdicts
            holds = f"{cell.coverage:.1%} ({cell.error:.1%})" if cell.judged else "-"
            print(
                f"{utilisation:4.0%}  {minutes:7.0f}  {share:12.1%}  {1 - share:12.1%}"
                f"  {holds:>21}  {cell.wrong:14d}",
                flush=True,
            )
    judged = sum(cell.judged for cell in cells)
    held = sum(cell.held for cell in cells)
    print(f"all: {held / judged:.1%} of {judged} intervals behind a verdict hold the truth")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
