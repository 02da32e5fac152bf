"""The health of the load client: how far it distorted what it measured."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING

from minicluster.config import parse, read_json
from minicluster.files import write_atomically
from minicluster.machine import processor
from minicluster.stats.quantiles import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minicluster.specs.slo import SloSpec
    from minicluster.workload.samples import Sample

MAX_CPU_FRACTION = 0.8
"""Largest fraction of a core in use: beyond it requests wait for the client's event loop."""

MAX_FRACTION_OF_LIMIT = 0.05
"""Largest fraction of an SLO limit that the client's own lag may make up, at the SLO's percentile.
An error of 5 % is below what other noise does to a tail latency."""

MAX_LAG_P90_S = 0.010
"""Largest p90 of the timer's lateness: beyond it the event loop always has work waiting."""

STALL_S = 0.5  # a timer this late means a stalled process: suspended, swapped out, or overloaded
MAX_STALLED_FRACTION = 0.01  # largest fraction of a run for which a client process may be stalled
LOST_WORKER = "short of a worker"  # `Client.stop` of a run that lost one of its processes

KILLED = "killed"
"""`Client.stop` until the end of the run, and so of a client that could not write any other."""

UNWRITABLE = "out of disk space"
"""`Client.stop` of a run whose samples could not be written for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """
    The client's report about itself, kept in `client.json`.

    Attributes:
        stop: why the run ended: `complete`, `interrupted`, `died` (the target did), `orphaned`
            (the process that waited for the result did), or one of the constants above.
        origin_monotonic_s: start of the run on this machine's monotonic clock.
        cpu_fraction: of one core, from the window's start on; the busiest of several processes.
        connections: number opened; each is used again as soon as its answer has been read.
        stamps: `kernel` where the kernel timestamped the arrival of every chunk, `reader` where
            the client's late wake-ups are in some of the timestamps (TLS, or no Linux); empty
            where nothing arrived.
        heartbeat_lag_s: lateness of each 5 ms timer, ascending.
        stalled_s: sum of the latenesses above `STALL_S` from the window's start on.
    """

    stop: str
    started_unix_s: float
    origin_monotonic_s: float
    wall_s: float
    cpu_fraction: float
    heartbeat_lag_s: tuple[float, ...]
    machine: str
    versions: dict[str, str]
    connections: int = 0
    processes: int = 1
    stamps: str = ""
    stalled_s: float = 0.0

    def in_seconds_of(self, slowdown: float) -> Client:
        """Return the report with its latenesses in seconds that take *slowdown* of the clock."""
        return replace(
            self,
            heartbeat_lag_s=tuple(lag_s / slowdown for lag_s in self.heartbeat_lag_s),
            stalled_s=self.stalled_s / slowdown,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """
    Whether the client kept up; `problems` says why not. The rest is as in `Client`.

    Attributes:
        dispatch_lag_p99_s: due time to send.
        saturated: whether the client was overloaded, whatever the SLO's limits are.
    """

    dispatch_lag_p99_s: float
    heartbeat_lag_p90_s: float
    heartbeat_lag_p99_s: float
    cpu_fraction: float
    connections: int
    processes: int
    stamps: str
    saturated: bool
    problems: tuple[str, ...]


def new_client(stop: str, *, started_unix_s: float, origin_monotonic_s: float) -> Client:
    """Return the report of a process that has just started."""
    return Client(
        stop=stop,
        started_unix_s=started_unix_s,
        origin_monotonic_s=origin_monotonic_s,
        wall_s=0.0,
        cpu_fraction=0.0,
        heartbeat_lag_s=(),
        machine=f"{processor()}, {platform.system()} {platform.release()}",
        versions={name: metadata.version(name) for name in ("minicluster", "locust")}
        | {"python": platform.python_version()},
    )


def merged(clients: Sequence[Client]) -> Client:
    """Return the reports of several processes as one, with the worst value of each."""
    first = clients[0]
    return replace(
        first,
        stop=next((c.stop for c in clients if c.stop != "complete"), "complete"),
        wall_s=max(c.wall_s for c in clients),
        cpu_fraction=max(c.cpu_fraction for c in clients),
        heartbeat_lag_s=tuple(sorted(lag for c in clients for lag in c.heartbeat_lag_s)),
        stalled_s=max(c.stalled_s for c in clients),
        connections=sum(c.connections for c in clients),
        processes=len(clients),
        stamps=max(c.stamps for c in clients),  # the reader's before the kernel's before none
    )


def health(
    client: Client, samples: tuple[Sample, ...], slo: SloSpec, *, queued: bool = False
) -> Health:
    """
    Judge whether the client's own lag is small against the limits of *slo*.

    A TTFT contains the dispatch lag and at most one late timestamp, a TPOT two late timestamps
    spread over the tokens, a gap one. None of these, at the percentile of the SLO, may reach
    `MAX_FRACTION_OF_LIMIT` of the limit: a rarer lag changes the attained fraction by less than
    its own frequency. Where requests waited in the client on purpose (*queued*), because another
    tool capped those in flight, the wait is no lag.
    """
    dispatch_lags_s = [s.send_s - s.due_s for s in samples]
    heartbeat_lags_s = list(client.heartbeat_lag_s)
    lag_p90_s = quantile(heartbeat_lags_s, 0.90)
    dispatch_lag_s, heartbeat_lag_s = (
        quantile(lags_s, slo.level) for lags_s in (dispatch_lags_s, heartbeat_lags_s)
    )
    dispatch_lag_s = 0.0 if queued else dispatch_lag_s
    saturation = _saturation(client.cpu_fraction, lag_p90_s)
    problems = [*_lag_problems(dispatch_lag_s, heartbeat_lag_s, samples, slo), *saturation]
    if client.stalled_s > MAX_STALLED_FRACTION * client.wall_s:
        problems.append(
            f"it was stalled for {client.stalled_s:.1f} of {client.wall_s:.0f} s "
            f"(limit {MAX_STALLED_FRACTION:.0%}): suspended, or overloaded"
        )
    return Health(
        dispatch_lag_p99_s=quantile(dispatch_lags_s, 0.99),
        heartbeat_lag_p90_s=lag_p90_s,
        heartbeat_lag_p99_s=quantile(heartbeat_lags_s, 0.99),
        cpu_fraction=client.cpu_fraction,
        connections=client.connections,
        processes=client.processes,
        stamps=client.stamps,
        saturated=bool(saturation),
        problems=tuple(problems),
    )


def _lag_problems(
    dispatch_lag_s: float, heartbeat_lag_s: float, samples: tuple[Sample, ...], slo: SloSpec
) -> list[str]:
    output_tokens = min((s.asked_output_tokens for s in samples), default=2)
    lags = [("TTFT", dispatch_lag_s + heartbeat_lag_s, slo.ttft_s)]
    if slo.tpot_s and output_tokens > 1:
        lags.append(("TPOT", 2 * heartbeat_lag_s / (output_tokens - 1), slo.tpot_s))
    if slo.itl_s:
        lags.append(("ITL", heartbeat_lag_s, slo.itl_s))
    if slo.e2e_s:
        lags.append(("E2E", dispatch_lag_s + heartbeat_lag_s, slo.e2e_s))
    return [
        f"its own lag may make up {1000 * lag_s:.1f} ms of a {name}, "
        f"more than {MAX_FRACTION_OF_LIMIT:.0%} of the SLO limit of {1000 * limit_s:g} ms"
        for name, lag_s, limit_s in lags
        if lag_s > MAX_FRACTION_OF_LIMIT * limit_s
    ]


def _saturation(cpu_fraction: float, lag_p90_s: float) -> list[str]:
    problems = []
    if cpu_fraction > MAX_CPU_FRACTION:
        problems.append(f"it used {cpu_fraction:.0%} of its core, more than {MAX_CPU_FRACTION:.0%}")
    if lag_p90_s > MAX_LAG_P90_S:
        lag, limit = f"{1000 * lag_p90_s:.1f} ms", f"{1000 * MAX_LAG_P90_S:g} ms"
        problems.append(f"its timer's p90 lateness was {lag}, more than {limit}")
    return [f"it was saturated: {problem} (--processes shares the load)" for problem in problems]


def write_client(client: Client, path: Path) -> None:
    """
    Write *client* as JSON, its heartbeats thinned to 1,000 quantiles, or keep what was there.

    Raises InputError: the file cannot be written.
    """
    lags = client.heartbeat_lag_s
    thinned = [round(lags[i * len(lags) // 1000], 6) for i in range(1000)] if lags else []
    write_atomically(path, json.dumps(asdict(client) | {"heartbeat_lag_s": thinned}))


def read_client(path: Path) -> Client:
    """
    Read what `write_client` wrote.

    Raises InputError: no such file, or one that is no client's report.
    """
    expectation = "what the client of `loadtest run` wrote"
    return parse(Client, read_json(path, expectation), place=str(path))
