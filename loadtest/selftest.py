"""Prove the client: load a server whose timings are known, and print the client's own error."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.client import health
from loadtest.drive import drive
from loadtest.fake_server import Behaviour
from loadtest.order import Extent, free_load, make_job
from loadtest.run import prepare, read_run
from loadtest.spread import quantile
from sizing.errors import InputError, MiniclusterError
from sizing.specs.slo import SloSpec
from sizing.specs.workload import Lengths, WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.run import Run

SERVER = Behaviour(ttft_s=0.2, itl_s=0.02)
OUTPUT_TOKENS = 50
WARMUP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientError:
    """
    The client's error at one load: what it measured less what the server did.

    Attributes:
        streams: open at a time, on average.
        events_per_s: chunks received per second.
        ttft_error_p50_s: median of (TTFT from send - server's own TTFT).
        itl_error_p99_s: absolute, over all gaps.
        tpot_error_p99_s: absolute, over all requests.
        fit: whether a run at this load would count.
    """

    streams: int
    num_requests: int
    events_per_s: float
    ttft_error_p50_s: float
    ttft_error_p99_s: float
    itl_error_p99_s: float
    tpot_error_p99_s: float
    heartbeat_lag_p99_s: float
    cpu_fraction: float
    fit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the server did for one request, on its monotonic clock."""

    received_s: float
    chunk_s: tuple[float, ...]


def measure_client(streams: int, window_s: float) -> ClientError:
    """
    Load the bundled server with *streams* concurrent streams, and compare notes with it.

    Both processes read the same monotonic clock, but only differences of stamps of one process
    are compared, so the error holds what the network path and both processes' wake-ups add.
    """
    per_request_s = SERVER.ttft_s + (OUTPUT_TOKENS - 1) * SERVER.itl_s
    workload = WorkloadSpec(
        requests_per_s=streams / per_request_s,
        input_tokens=Lengths.fixed(16),
        output_tokens=Lengths.fixed(OUTPUT_TOKENS),
    )
    load = free_load(workload, SloSpec(), model=SERVER.model, vocab_size=1000)
    extent = Extent(duration_s=window_s, warmup_s=WARMUP_S)
    with tempfile.TemporaryDirectory(prefix="loadtest-") as name:
        folder = Path(name)
        log = folder / "truth.jsonl"
        with fake_server(log) as host:
            job = make_job(load, extent, host=host, model=SERVER.model)
            prepare(folder, job, job.requests(), None)
            drive(folder, lambda _: None)
        return _compare(read_run(folder), read_truth(log), streams)


@contextmanager
def fake_server(log: Path) -> Iterator[str]:
    """Run the bundled server as a process of its own; yield its address."""
    command = [sys.executable, "-m", "loadtest.fake_server", "--log", str(log)]
    command += ["--ttft-s", str(SERVER.ttft_s), "--itl-s", str(SERVER.itl_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603
        try:
            host = server.stdout.readline().strip() if server.stdout else ""
            if not host:
                raise MiniclusterError("the bundled server did not start; see above")
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


def _compare(run: Run, truth: dict[int, Truth], streams: int) -> ClientError:
    pairs = [(s, truth[s.index]) for s in run.measured if s.ok and s.index in truth]
    if not pairs:
        raise MiniclusterError("the bundled server answered nothing; see above")
    ttft = [s.ttft_send_s - (true.chunk_s[0] - true.received_s) for s, true in pairs]
    gaps, tpots = [], []
    for s, true in pairs:
        true_gaps = [b - a for a, b in zip(true.chunk_s, true.chunk_s[1:], strict=False)]
        gaps += [abs(a - b) for a, b in zip(s.gaps_s, true_gaps, strict=True)]
        tpots.append(abs((s.tpot_s or 0.0) - sum(true_gaps) / len(true_gaps)))
    own = health(run.client, run.measured, run.job.slo)
    return ClientError(
        streams=streams,
        num_requests=len(pairs),
        events_per_s=sum(len(s.chunk_s) for s, _ in pairs) / run.job.window.length_s,
        ttft_error_p50_s=quantile(ttft, 0.50),
        ttft_error_p99_s=quantile(ttft, 0.99),
        itl_error_p99_s=quantile(gaps, 0.99),
        tpot_error_p99_s=quantile(tpots, 0.99),
        heartbeat_lag_p99_s=own.heartbeat_lag_p99_s,
        cpu_fraction=own.cpu_fraction,
        fit=not own.problems,
    )


def parse_streams(text: str) -> tuple[int, ...]:
    """Read `1,20,100`."""
    try:
        streams = tuple(int(part) for part in text.split(","))
    except ValueError:
        streams = ()
    if not streams or min(streams) < 1:
        raise InputError("--streams", text, "whole numbers from 1, like 1,20,100")
    return streams
