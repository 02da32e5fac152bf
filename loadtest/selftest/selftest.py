"""The client's own error and capacity, measured against a mock server with known timings."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.client.launch import launch_client
from loadtest.run.client_health import health
from loadtest.run.folder import Run, prepare, read_run
from loadtest.run.run_config import RunLength, free_load, make_job
from loadtest.selftest.mock_server import MockConfig
from minicluster.errors import InputError, MiniclusterError
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.stats.quantiles import quantile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.run.job import Job

TTFT_S = 0.2
OUTPUT_TOKENS = 50
WARMUP_S = 2.0
GROWTH = 1.5  # ratio of consecutive numbers of streams in the search for the capacity
MIN_REQUESTS = 20  # least number of requests at each level, so that a p99 is not a single outlier's
MAX_STREAMS = 5000  # largest number of streams of the search: one process is saturated long before


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A number of concurrent streams, with a token every *itl_s*."""

    streams: int
    itl_s: float = 0.02

    @property
    def requests_per_s(self) -> float:
        """The rate that keeps so many streams open on average (Little's law)."""
        return self.streams / (TTFT_S + (OUTPUT_TOKENS - 1) * self.itl_s)


FIRST_OF_SEARCH = Level(streams=200, itl_s=0.01)
"""The load with which the search for the capacity begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientError:
    """
    The client's error at one load: its measurement minus the mock server's own times.

    Attributes:
        streams: mean number of concurrent streams.
        events_per_s: chunks received in the window, per second of it.
        itl_error_p99_s, tpot_error_p99_s: of the absolute errors, over all gaps and requests.
        cpu_fraction: of one core.
        fit: whether a run at this load would be valid.
    """

    streams: int
    itl_s: float
    num_requests: int
    events_per_s: float
    ttft_error_p50_s: float
    ttft_error_p99_s: float
    itl_error_p99_s: float
    tpot_error_p99_s: float
    heartbeat_lag_p90_s: float
    heartbeat_lag_p99_s: float
    cpu_fraction: float
    fit: bool
    saturated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The mock server's own times of one request, on its monotonic clock."""

    received_s: float
    chunk_s: tuple[float, ...]


def measure_client(level: Level, window_s: float) -> ClientError:
    """
    Load the mock server with the streams of *level*, and compare the times of both sides.

    Both processes read the same monotonic clock, but only differences of timestamps of one process
    are compared, so the error contains the delays of the network path and of both processes.
    """
    with tempfile.TemporaryDirectory(prefix="loadtest-") as name:
        folder = Path(name)
        log = folder / "truth.jsonl"
        with mock_server(MockConfig(ttft_s=TTFT_S, itl_s=level.itl_s), log) as host:
            job = level_job(level, max(window_s, MIN_REQUESTS / level.requests_per_s), host)
            prepare(folder, job, job.requests(), None)
            launch_client(folder, lambda _: None)
        return client_error(read_run(folder), read_truth(log), level)


def measure_capacity(window_s: float) -> list[ClientError]:
    """
    Increase the number of streams by half each time, until the client is saturated.

    Returns: The errors at increasing loads; the last load saturates the client.
    """
    tried: list[ClientError] = []
    level = FIRST_OF_SEARCH
    while level.streams <= MAX_STREAMS and not (tried and tried[-1].saturated):
        tried.append(measure_client(level, window_s))
        level = replace(level, streams=int(level.streams * GROWTH))
    return tried


def level_job(level: Level, window_s: float, host: str) -> Job:
    """Return a job with the streams of *level* in flight on average."""
    workload = WorkloadSpec(
        requests_per_s=level.requests_per_s,
        input_tokens=Lengths.fixed(16),
        output_tokens=Lengths.fixed(OUTPUT_TOKENS),
    )
    load = free_load(workload, SloSpec(), model=MockConfig().model, vocab_size=1000)
    length = RunLength(duration_s=window_s, warmup_s=WARMUP_S)
    return make_job(load, length, host=host)


@contextmanager
def mock_server(
    config: MockConfig, log: Path | None = None, *, certificate: str = ""
) -> Iterator[str]:
    """Run the mock server as a process of its own; yield its address."""
    command = [sys.executable, "-m", "loadtest.selftest.mock_server"]
    options = asdict(config) | {"log": log or "", "certificate": certificate}
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603
        try:
            host = server.stdout.readline().strip() if server.stdout else ""
            if not host:
                raise MiniclusterError("the mock server did not start; see above")
            yield host
        finally:
            server.kill()


def read_truth(log: Path) -> dict[int, Truth]:
    """Read the server's log, by request."""
    truth = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        index = int(row["id"].rpartition("-")[2])
        truth[index] = Truth(received_s=row["received_s"], chunk_s=tuple(row["chunk_s"]))
    return truth


def client_error(run: Run, truth: dict[int, Truth], level: Level) -> ClientError:
    """Compare the samples of *run* with the mock server's own times, request by request."""
    pairs = [(s, truth[s.index]) for s in run.measured if s.ok and s.index in truth]
    if not pairs:
        raise MiniclusterError("the mock server answered no request; see above")
    ttft = [s.ttft_send_s - (true.chunk_s[0] - true.received_s) for s, true in pairs]
    gaps, tpots = [], []
    for s, true in pairs:
        true_gaps = [b - a for a, b in pairwise(true.chunk_s)]
        gaps += [abs(a - b) for a, b in zip(s.gaps_s, true_gaps, strict=True)]
        tpots.append(abs((s.tpot_s or 0.0) - sum(true_gaps) / len(true_gaps)))
    own, window = health(run.client, run.measured, run.job.slo), run.job.window
    in_window = (window.start_s <= t < window.end_s for s in run.samples for t in s.chunk_s)
    return ClientError(
        streams=level.streams,
        itl_s=level.itl_s,
        num_requests=len(pairs),
        events_per_s=sum(in_window) / window.length_s,
        ttft_error_p50_s=quantile(ttft, 0.50),
        ttft_error_p99_s=quantile(ttft, 0.99),
        itl_error_p99_s=quantile(gaps, 0.99),
        tpot_error_p99_s=quantile(tpots, 0.99),
        heartbeat_lag_p90_s=own.heartbeat_lag_p90_s,
        heartbeat_lag_p99_s=own.heartbeat_lag_p99_s,
        cpu_fraction=own.cpu_fraction,
        fit=not own.problems,
        saturated=own.saturated,
    )


def parse_streams(text: str) -> tuple[Level, ...]:
    """
    Parse `1,50,200@0.04`: concurrent streams, and seconds between tokens (0.02 by default).

    Raises InputError: another form.
    """
    try:
        parts = [part.partition("@") for part in text.split(",")]
        levels = tuple(
            Level(streams=int(streams), itl_s=float(itl_s or 0.02)) for streams, _, itl_s in parts
        )
    except ValueError:
        levels = ()
    if not levels or any(level.streams < 1 or not level.itl_s > 0 for level in levels):
        raise InputError("--streams", text, "whole numbers from 1, like 1,50,200@0.04 (seconds)")
    return levels
