"""
Verdicts on few requests near capacity: queues of 1 to 8 servers, and latencies that last.

Requests by the hundred, p90, limits that are kept or missed by a little and by a lot. Two kinds of
latency: a wait with the first seventh of the service (TTFT), and the mean number in service while
a request is (TPOT, where a step takes the longer the more it serves). Truths come from a run of
its own, `LONG` requests. Few of these runs can tell: half of them meet one burst or none. Of
verdicts next to the limit, those that are given are mostly the wrong ones, whatever the interval:
see "all" and "wrong". Run: `python benchmarks/verdict_small.py [RUNS [SEED]]`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from verdict_coverage import FIRST_SHARE, HEAD, Cell, cell_of, row, verdicts, waits_s

from loadtest.run.schedule import Window
from minicluster.stats.quantiles import LEVELS

if TYPE_CHECKING:
    from numpy.typing import NDArray

TARGET = "p90"
TRUTHS = (0.7, 0.85, 0.95, 0.98, 0.995, 0.999)
COUNTS = (350, 1000, 2000)
LONG = 2_000_000
WARMUP_S = 20.0
STRETCH = 40
"""Requests in a stretch of many or few, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """
    Where requests come from and what serves them; a service takes 1 s on average.

    Attributes:
        servers: 0: every request is served at once, and slows the others.
        load: of the servers; without any the mean number in service.
        service: "exponential", "constant", or the sigma of a lognormal.
        arrivals: "poisson", "gamma" (gaps of variance 4) or "stretches" (of three times the rate).
    """

    servers: int
    load: float
    service: str
    arrivals: str = "poisson"

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.load * max(1, self.servers)


QUEUES = (
    Queue(servers=1, load=0.85, service="0.3"),
    Queue(servers=1, load=0.9, service="exponential"),
    Queue(servers=1, load=0.95, service="0.3"),
    Queue(servers=2, load=0.9, service="0.3"),
    Queue(servers=4, load=0.95, service="constant"),
    Queue(servers=4, load=0.85, service="0.3", arrivals="gamma"),
    Queue(servers=8, load=0.85, service="0.3"),
    Queue(servers=8, load=0.9, service="exponential"),
    Queue(servers=8, load=0.85, service="constant", arrivals="stretches"),
    Queue(servers=0, load=30, service="0.3"),
    Queue(servers=0, load=60, service="exponential"),
    Queue(servers=0, load=60, service="0.3", arrivals="gamma"),
)


def draw(rng: np.random.Generator, queue: Queue, count: int) -> NDArray[np.float64]:
    """Arrivals and latencies from an empty start, shape (2, count)."""
    due = np.cumsum(_gaps(rng, queue.arrivals, count)) / queue.rate
    service = _services(rng, queue.service, count)
    if queue.servers:
        return np.stack([due, waits_s(due, service, queue.servers) + FIRST_SHARE * service])
    times = np.concatenate([due, due + service])
    order = np.argsort(times, kind="stable")
    serving = np.cumsum(np.repeat([1.0, -1.0], count)[order])
    total = np.concatenate([[0.0], np.cumsum(serving[:-1] * np.diff(times[order]))])
    at = np.empty(2 * count)
    at[order] = total
    return np.stack([due, (at[count:] - at[:count]) / service])


def _gaps(rng: np.random.Generator, arrivals: str, count: int) -> NDArray[np.float64]:
    """Gaps of 1 on average, shape (count,)."""
    if arrivals == "poisson":
        return rng.exponential(size=count)
    if arrivals == "gamma":
        return rng.gamma(0.25, 4.0, count)
    lengths = rng.geometric(1 / STRETCH, count) * np.resize([1.5, 0.5], count)
    gaps = np.repeat(np.resize([1 / 1.5, 1 / 0.5], count), np.ceil(lengths).astype(np.int64))
    return np.asarray(gaps[:count] * rng.exponential(size=count))


def _services(rng: np.random.Generator, service: str, count: int) -> NDArray[np.float64]:
    """Return service times with a mean of 1 s, shape (count,)."""
    if service == "exponential":
        return rng.exponential(size=count)
    if service == "constant":
        return np.ones(count)
    sigma = float(service)
    return rng.lognormal(-(sigma**2) / 2, sigma, count)


def limits_of(queue: Queue) -> dict[float, float]:
    """Latencies within which `TRUTHS` lie, and the `TARGET` itself."""
    latencies = draw(np.random.default_rng(LONG), queue, LONG)[1]
    return {truth: float(np.quantile(latencies, truth)) for truth in (*TRUTHS, LEVELS[TARGET])}


def measure(queue: Queue, limits: dict[float, float], count: int, runs: int, seed: int) -> Cell:
    """Judge runs of about *count* requests."""
    end_s = WARMUP_S + count / queue.rate
    window = Window(start_s=WARMUP_S, end_s=end_s, drain_s=0.0)
    kind = [queue.servers, round(100 * queue.load), count]
    found = []
    for run in range(runs):
        rng = np.random.default_rng([*kind, run, seed])
        due, values = draw(rng, queue, round(2 * end_s * queue.rate))
        came = due < window.end_s
        found.append(verdicts(due[came], values[came], window, limits, TARGET))
    return cell_of(found, TRUTHS, LEVELS[TARGET])


def together(cells: list[Cell]) -> Cell:
    """Put the runs of several cells into one."""
    names = ("truths", "counts", "shares", "signs", "holds", "own")
    joined = {name: np.concatenate([getattr(cell, name) for cell in cells]) for name in names}
    return replace(cells[0], **joined)


def main(runs: int, seed: int) -> None:
    """Print a row for each queue and length, and for all of a length."""
    print(f"{runs} runs each, verdicts on {TARGET} at {len(TRUTHS)} limits, seed {seed}")
    print(f"{'':28}count{HEAD}  {'  '.join(f'{truth:6.1%}' for truth in TRUTHS)}")
    limits = [limits_of(queue) for queue in QUEUES]
    for count in COUNTS:
        cells = []
        for queue, its in zip(QUEUES, limits, strict=True):
            cells.append(measure(queue, its, count, runs, seed))
            name = f"{queue.servers or 'in'} {queue.load:g} {queue.service} {queue.arrivals}"
            print(f"{name:28}{count:5d}{row(cells[-1], cells[-1].known())}", flush=True)
        print(f"{'all':28}{count:5d}{row(together(cells), math.nan)}", flush=True)


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    main(given[0] if given else 200, given[1] if len(given) > 1 else 0)
