"""The client's own health: what it did to the measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.stats.quantiles import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minicluster.specs.slo import SloSpec
    from minicluster.workload.samples import Sample

MAX_CPU_FRACTION = 0.8
MAX_SHARE_OF_LIMIT = 0.05
"""Share of any promised latency that the client's own lag may make up, at its p99."""
MAX_USUAL_LAG_S = 0.010
"""Lateness of one wake-up in ten, at most: beyond it the event loop has work waiting."""

STILL_S = 0.5
"""A process that wakes later was stopped, swapped out, or had far too much to do."""
MAX_STILL_FRACTION = 0.01
"""Share of a run that it may stand still."""

SHORT = "short of a worker"
"""Why a run stopped that lost one of its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """
    What the client process says of itself, kept in `client.json`.

    Attributes:
        stop: `complete`, `interrupted`, `died` (the target did), `orphaned`, or
            `short of a worker`.
        origin_monotonic_s: start of the run on this machine's monotonic clock.
        cpu_fraction: of one core, from the window's start on; of several processes the busiest.
        connections: opened in all; each is used again as soon as its answer has been read.
        processes: that sent.
        stamps: `kernel` where it says when each chunk arrived, `reader` where a late wake-up is in
            some of the stamps (TLS, or no Linux); empty where nothing arrived.
        heartbeat_lag_s: how late it woke from each 5 ms sleep, ascending.
        still_s: of these, those above `STILL_S` from the window's start on, together.
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
    still_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """
    Whether the client kept up; `problems` says why not.

    Attributes:
        dispatch_lag_p99_s: due time to send.
        heartbeat_lag_p90_s: lateness of a 5 ms timer, so of every stamp that the reader makes.
        connections: opened; all requests but so many found one open.
        stamps: of the `kernel` or of the `reader`, see `Client`.
        saturated: whether it had more to do than it could, whatever the limits are.
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


def merged(clients: Sequence[Client]) -> Client:
    """Return several processes of one run as one client: what went worst counts."""
    first = clients[0]
    return replace(
        first,
        stop=next((c.stop for c in clients if c.stop != "complete"), "complete"),
        wall_s=max(c.wall_s for c in clients),
        cpu_fraction=max(c.cpu_fraction for c in clients),
        heartbeat_lag_s=tuple(sorted(lag for c in clients for lag in c.heartbeat_lag_s)),
        still_s=max(c.still_s for c in clients),
        connections=sum(c.connections for c in clients),
        processes=len(clients),
        stamps=max(c.stamps for c in clients),  # the reader's before the kernel's before none
    )


def health(client: Client, samples: tuple[Sample, ...], slo: SloSpec) -> Health:
    """
    Judge the client by its share in what it measured.

    A TTFT holds the dispatch lag and one late stamp, a TPOT two late stamps spread over the
    tokens, a gap one: at most, for where the kernel stamps, only what a late reader finds in one
    piece is stamped late. None of these, at the percentile of the SLO, may reach 5 % of the limit
    it is compared with: rarer lags move the share of the requests that keep it by less than their
    own.
    """
    share = slo.level
    lags_s = [s.send_s - s.due_s for s in samples]
    dispatch_s = quantile(lags_s, 0.99)
    beats = list(client.heartbeat_lag_s)
    usual_s, beat_s = quantile(beats, 0.90), quantile(beats, 0.99)
    saturation = _saturation(client.cpu_fraction, usual_s)
    return Health(
        dispatch_lag_p99_s=dispatch_s,
        heartbeat_lag_p90_s=usual_s,
        heartbeat_lag_p99_s=beat_s,
        cpu_fraction=client.cpu_fraction,
        connections=client.connections,
        processes=client.processes,
        stamps=client.stamps,
        saturated=bool(saturation),
        problems=(
            *_shares(quantile(lags_s, share), quantile(beats, share), samples, slo),
            *saturation,
            *_still(client),
        ),
    )


def _shares(
    dispatch_s: float, beat_s: float, samples: tuple[Sample, ...], slo: SloSpec
) -> list[str]:
    """Say where the client's own lag makes up too much of a limit."""
    tokens = min((s.asked_output_tokens for s in samples), default=2)
    shares = [("TTFT", dispatch_s + beat_s, slo.ttft_s)]
    if slo.tpot_s and tokens > 1:
        shares.append(("TPOT", 2 * beat_s / (tokens - 1), slo.tpot_s))
    if slo.itl_s:
        shares.append(("ITL", beat_s, slo.itl_s))
    return [
        f"its own lag may make up {1000 * own_s:.1f} ms of a {name}, "
        f"more than {MAX_SHARE_OF_LIMIT:.0%} of the {1000 * limit_s:g} ms promised"
        for name, own_s, limit_s in shares
        if own_s > MAX_SHARE_OF_LIMIT * limit_s
    ]


def _still(client: Client) -> list[str]:
    """Say whether a process was kept from running: what came due meanwhile went out together."""
    if client.still_s <= MAX_STILL_FRACTION * client.wall_s:
        return []
    return [
        (
            f"it stood still for {client.still_s:.1f} of {client.wall_s:.0f} s "
            f"(allowed {MAX_STILL_FRACTION:.0%}; was it stopped, or had it too much to do?)"
        )
    ]


def _saturation(cpu_fraction: float, usual_lag_s: float) -> list[str]:
    """Say whether a process had more to do than it could."""
    problems = []
    if cpu_fraction > MAX_CPU_FRACTION:
        problems.append(
            f"saturated: it used {cpu_fraction:.0%} of its core, more than {MAX_CPU_FRACTION:.0%} "
            "(--processes shares the load)"
        )
    if usual_lag_s > MAX_USUAL_LAG_S:
        problems.append(
            f"saturated: one wake-up in ten was more than {1000 * usual_lag_s:.1f} ms late "
            f"(allowed {1000 * MAX_USUAL_LAG_S:g} ms; --processes shares the load)"
        )
    return problems


def write_client(client: Client, path: Path) -> None:
    """Write *client* as JSON, its heartbeats thinned to 1,000 quantiles."""
    lags = client.heartbeat_lag_s
    thinned = [round(lags[i * len(lags) // 1000], 6) for i in range(1000)] if lags else []
    path.write_text(json.dumps(asdict(client) | {"heartbeat_lag_s": thinned}), encoding="utf-8")


def read_client(path: Path) -> Client:
    """Read what `write_client` wrote."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Client(**raw | {"heartbeat_lag_s": tuple(raw["heartbeat_lag_s"])})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(str(path), str(error), "what the client of `loadtest run` wrote") from None
