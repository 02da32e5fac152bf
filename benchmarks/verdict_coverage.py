"""
How often the verdict's 95 % interval holds the truth, on queues whose truth is known.

M/G/k with 40 servers, lognormal service; a request's TTFT is its wait and the first seventh of
its service. Each run starts empty, and is cut and judged as `loadtest` does it, against limits
that are kept or missed by a little and by a lot. What a run can show depends on its length: of
intervals that are right, those that lead to a verdict are not a fair choice. So each row also has
the coverage of all intervals, and that behind a verdict where the design effect is known instead
of estimated. Exit code 1 if coverage behind a verdict lies outside 93 to 97 % by more than two of
its standard errors. Run: `python benchmarks/verdict_coverage.py [RUNS [SEED]]`.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.run.schedule import Window
from loadtest.verdict.decision import slo_verdict
from loadtest.verdict.slo import judge_limit, limit_verdict
from loadtest.verdict.window import CountedPart, steady_part
from minicluster.stats.shares import LEVELS, share_interval

SERVERS = 40
SERVICE_S = 1.46
SERVICE_SIGMA = 0.3
FIRST_SHARE = 0.14
WARMUP_S = 20 * SERVICE_S
TARGET = "p99"
LEVEL = LEVELS[TARGET]
TRUTHS = (0.9, 0.97, 0.998, 0.9995)
"""Shares of requests that keep each limit in the long run, where p99 asks for 0.99."""

LIMITS_S = {
    0.5: (0.28703, 0.34361, 0.46339, 0.52393),
    0.75: (0.29813, 0.36813, 0.55667, 0.66068),
    0.88: (0.44626, 0.64391, 1.07278, 1.30813),
}
"""TTFT within which `TRUTHS` lie, by utilisation: quantiles of 32 million requests each."""

PERCENTILES_S = {0.5: 0.3927, 0.75: 0.4387, 0.88: 0.8185}
"""The `TARGET` itself: of 29 million requests each."""

MINUTES = (2, 5, 30)
WANTED = (0.93, 0.97)
SIGNS = {"met": 1, "missed": -1, "inconclusive": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """
    Verdicts on runs of one kind, of shape (runs, truths) but for the last.

    Attributes:
        counts: requests that count.
        shares: of them within the limit.
        signs: 1 PASS, -1 FAIL, 0 INCONCLUSIVE.
        holds: whether the interval holds the truth.
        own: whether the interval of the percentile itself holds that, verdict or not, (runs,).
    """

    counts: NDArray[np.float64]
    shares: NDArray[np.float64]
    signs: NDArray[np.int64]
    holds: NDArray[np.bool_]
    own: NDArray[np.bool_]

    @property
    def judged(self) -> int:
        """PASS or FAIL."""
        return int(np.count_nonzero(self.signs))

    @property
    def held(self) -> int:
        """Number of these whose interval contains the truth."""
        return int(self.holds[self.signs != 0].sum())

    @property
    def wrong(self) -> int:
        """Verdicts against the truth."""
        return int((self.signs == np.where(np.array(TRUTHS) >= LEVEL, -1, 1)).sum())

    @property
    def coverage(self) -> float:
        """Fraction of the decisive intervals that contain the truth."""
        return self.held / self.judged if self.judged else math.nan

    @property
    def error(self) -> float:
        """Standard error of `coverage`; the verdicts of one run go together."""
        given = self.signs != 0
        beside = (self.holds & given).sum(axis=1) - given.sum(axis=1) * self.coverage
        return float(np.sqrt(beside @ beside)) / self.judged if self.judged else math.nan

    @property
    def outside(self) -> bool:
        """Whether `coverage` lies outside `WANTED` by more than two standard errors."""
        low, high = WANTED
        within = low - 2 * self.error <= self.coverage <= high + 2 * self.error
        return self.judged > 0 and not within

    def known(self) -> float:
        """`coverage` as it were if each limit's design effect were known, not estimated."""
        truths = np.array(TRUTHS)
        beside = (self.shares - truths) ** 2 * self.counts
        effects = np.maximum(1.0, beside.mean(axis=0) / (truths * (1 - truths)))
        held = []
        for (run, k), share in np.ndenumerate(self.shares):
            count = int(self.counts[run, k])
            around = share_interval(float(share), count, float(effects[k]))
            if limit_verdict(LEVEL, count, around.low, around.high) != "inconclusive":
                held.append(around.low <= TRUTHS[k] <= around.high)
        return float(np.mean(held)) if held else math.nan


def waits_s(
    due_s: NDArray[np.float64], service_s: NDArray[np.float64], servers: int
) -> NDArray[np.float64]:
    """Waits of requests that are served in the order of their arrival, shape (n,)."""
    free = [0.0] * servers
    waits = np.empty(len(due_s))
    for k, (at, takes) in enumerate(zip(due_s.tolist(), service_s.tolist(), strict=True)):
        begins = max(free[0], at)
        heapq.heapreplace(free, begins + takes)
        waits[k] = begins - at
    return waits


def ttft_s(rng: np.random.Generator, utilisation: float, duration_s: float) -> NDArray[np.float64]:
    """Return arrivals and TTFTs of a queue that starts empty, shape (2, n)."""
    rate = SERVERS * utilisation / SERVICE_S
    count = rng.poisson(rate * duration_s)
    due = np.sort(rng.uniform(0, duration_s, count))
    mu = math.log(SERVICE_S) - SERVICE_SIGMA**2 / 2
    service = rng.lognormal(mu, SERVICE_SIGMA, count)
    return np.stack([due, waits_s(due, service, SERVERS) + FIRST_SHARE * service])


def judged(
    counted: NDArray[np.float64], steady: CountedPart, truth: float, limit_s: float
) -> tuple[float, float, int, bool]:
    """
    Judge the values that count in one run against a limit, as `loadtest` does.

    Returns:
        How many they are, the share of them within the limit, the verdict's sign, and whether the
        interval holds *truth*, the share that keeps the limit in the long run.
    """
    result = judge_limit("ttft", counted, limit_s=limit_s, percentile=TARGET)
    verdict, _ = slo_verdict(steady, (result,))
    holds = result.attained_low <= truth <= result.attained_high
    return len(counted), result.attained_fraction, SIGNS[verdict], holds


def measure(utilisation: float, minutes: float, runs: int, seed: int | None = None) -> Cell:
    """
    Judge *runs* runs against limits that the share `TRUTHS` of requests keeps.

    The last limit is the percentile itself: the interval of its share holds `LEVEL` just where the
    interval of the percentile (`percentile_interval`) holds that limit.
    """
    window = Window(start_s=WARMUP_S, end_s=WARMUP_S + 60 * minutes, drain_s=0.0)
    limits = [*zip(TRUTHS, LIMITS_S[utilisation], strict=True), (LEVEL, PERCENTILES_S[utilisation])]
    kind = [round(100 * utilisation), round(60 * minutes)]
    found = []
    for run in range(runs):
        rng = np.random.default_rng([*kind, run] if seed is None else [*kind, run, seed])
        due, values = ttft_s(rng, utilisation, window.end_s)
        steady = steady_part(due, values, window)
        counted = values[due >= steady.start_s]
        found.append([judged(counted, steady, *limit) for limit in limits])
    counts, shares, signs, holds = np.moveaxis(np.array(found, dtype=np.float64), 2, 0)
    return Cell(
        counts=counts[:, :-1],
        shares=shares[:, :-1],
        signs=signs[:, :-1].astype(np.int64),
        holds=holds[:, :-1].astype(np.bool_),
        own=holds[:, -1].astype(np.bool_),
    )


def percent(share: float) -> str:
    """Return a fraction as text, or a dash."""
    return "-" if math.isnan(share) else f"{share:.1%}"


def row(cell: Cell, known: float) -> str:
    """Return a cell: verdicts, coverage, with *known* effects, and by true value."""
    given = cell.signs != 0
    by_truth = [
        percent(float(cell.holds[given[:, k], k].mean()) if given[:, k].any() else math.nan)
        for k in range(cell.signs.shape[1])
    ]
    holds = f"{cell.coverage:.1%} ({cell.error:.1%})" if cell.judged else "-"
    return (
        f"{(cell.signs > 0).mean():6.1%}  {(cell.signs < 0).mean():6.1%}  {(~given).mean():6.1%}"
        f"  {holds:>12}  {percent(known):>6}  {cell.holds.mean():6.1%}  {cell.wrong:5d}"
        f"  {cell.own.mean():6.1%}"
        f"  {'  '.join(f'{each:>6}' for each in by_truth)}{'  outside' * cell.outside}"
    )


HEAD = "  PASS    FAIL    open  holds (s.e.)   known     all  wrong     own"


def main(runs: int, seed: int | None) -> int:
    """Print a row for each utilisation and length, and all together."""
    print(f"M/G/{SERVERS}, {runs} runs each, verdicts on {TARGET} at {len(TRUTHS)} limits")
    print("holds: behind a verdict; known: if the design effect were; all: verdict or not;")
    print(
        f"own: the interval of the {TARGET} itself holds it; last: behind a verdict, by the truth"
    )
    print(f"load  min{HEAD}  {'  '.join(f'{truth:6.2%}' for truth in TRUTHS)}")
    cells = []
    for utilisation in LIMITS_S:
        for minutes in MINUTES:
            cells.append(measure(utilisation, minutes, runs, seed))
            print(
                f"{utilisation:4.0%}  {minutes:3.0f}{row(cells[-1], cells[-1].known())}", flush=True
            )
    judged_count, held = sum(cell.judged for cell in cells), sum(cell.held for cell in cells)
    share = held / judged_count
    print(f"all: {share:.1%} of {judged_count} intervals behind a verdict hold the truth")
    return int(any(cell.outside for cell in cells))


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    sys.exit(main(given[0] if given else 500, given[1] if len(given) > 1 else None))
