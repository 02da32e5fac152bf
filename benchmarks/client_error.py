"""
How wrong the load client is, and how much it bears, beside two others against the same server.

The bundled server logs when it truly sent each token. Three clients in turn load it alike: ours,
`vllm bench serve`, and a plain asyncio one (aiohttp). Each one's error is what it says less what
the server did; its cost is the processor time of its process while tokens came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from third_party import BENCH, tokenizer

from loadtest.run.folder import prepare
from loadtest.selftest.mock_stream import MockConfig
from loadtest.selftest.selftest import (
    OUTPUT_TOKENS,
    TTFT_S,
    ClientError,
    Level,
    level_job,
    measure_client,
    mock_server,
    parse_streams,
    read_truth,
)

if TYPE_CHECKING:
    from loadtest.run.job import Job
    from loadtest.selftest.selftest import Truth

MOST_STREAMS = 2000
"""Raised no further; no client here follows as many."""

FIGURES = {  # streams, ITL: allowed client error at p99, and whether it may be saturated
    (1, 0.02): (0.001, 0.002, False),
    (50, 0.02): (0.001, 0.002, False),
    (200, 0.04): (0.001, 0.002, False),
    (200, 0.02): (0.003, 0.003, True),
}
GOOD_ITL_S = 0.003
"""A client still follows a load if its ITL is right to this at p99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Result of one client at one load."""

    client: str
    streams: int
    itl_s: float
    events_per_s: float
    ttft_error_p99_s: float
    itl_error_p99_s: float
    cpu_fraction: float

    @property
    def follows(self) -> bool:
        """Whether the result is accurate enough to use."""
        return self.itl_error_p99_s <= GOOD_ITL_S


def ours(error: ClientError) -> Seen:
    """Read our own selftest."""
    return Seen(
        client="loadtest",
        streams=error.streams,
        itl_s=error.itl_s,
        events_per_s=error.events_per_s,
        ttft_error_p99_s=error.ttft_error_p99_s,
        itl_error_p99_s=error.itl_error_p99_s,
        cpu_fraction=error.cpu_fraction,
    )


class Meter:
    """Processor time of a process, sampled while it runs."""

    def __init__(self, pid: int) -> None:
        """Begin to sample."""
        self._process = psutil.Process(pid)
        self.rows: list[tuple[float, float]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                used = self._process.cpu_times()
            except psutil.Error:
                return
            self.rows.append((time.monotonic(), used.user + used.system))
            time.sleep(0.1)

    def fraction(self, from_s: float, to_s: float) -> float:
        """Return the share of a core used from *from_s* to *to_s*."""
        t, cpu = np.array(self.rows).T
        used = np.interp([from_s, to_s], t, cpu)
        return float((used[1] - used[0]) / (to_s - from_s))


def other(client: str, level: Level, window_s: float) -> Seen:
    """Load the bundled server with another client."""
    with tempfile.TemporaryDirectory(prefix="client-") as name:
        folder = Path(name)
        log = folder / "truth.jsonl"
        with mock_server(MockConfig(ttft_s=TTFT_S, itl_s=level.itl_s), log) as host:
            job = level_job(level, window_s, host)
            command = (plain_command if client == "plain asyncio" else vllm_command)(job, folder)
            with subprocess.Popen(  # noqa: S603  (ours)
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            ) as run:
                meter = Meter(run.pid)
                _, said = run.communicate()
        if run.returncode:
            raise SystemExit(f"{client} failed: {said.decode()[-2000:]}")
        rows = json.loads((folder / "seen.json").read_text())
        truth = read_truth(log)
    return compare(client, level, rows, truth, meter)


def compare(
    client: str, level: Level, rows: dict[str, Any], truth: dict[int, Truth], meter: Meter
) -> Seen:
    """
    Set what a client says beside what the server did.

    *rows* has TTFTs and gaps in the order of the requests. Only the middle of the run counts:
    the server's second to last second.
    """
    stamps = np.sort(np.concatenate([t.chunk_s for t in truth.values()]))
    from_s, to_s = stamps[0] + 1.5, stamps[-1] - 1.5
    ttft, itl = [], []
    for index, (said_s, gaps) in enumerate(zip(rows["ttfts"], rows["itls"], strict=True)):
        true = truth.get(index)
        if true is None or not from_s <= true.received_s <= to_s:
            continue
        ttft.append(said_s - (true.chunk_s[0] - true.received_s))
        true_gaps = [b - a for a, b in pairwise(true.chunk_s)]
        itl += [abs(a - b) for a, b in zip(gaps, true_gaps, strict=False)]
    events = float(np.searchsorted(stamps, to_s) - np.searchsorted(stamps, from_s))
    return Seen(
        client=client,
        streams=level.streams,
        itl_s=level.itl_s,
        events_per_s=events / (to_s - from_s),
        ttft_error_p99_s=float(np.quantile(ttft, 0.99)),
        itl_error_p99_s=float(np.quantile(itl, 0.99)),
        cpu_fraction=meter.fraction(from_s, to_s),
    )


def plain_command(job: Job, folder: Path) -> list[str]:
    """Run the plain client below on our own schedule."""
    prepare(folder, job, job.requests(), None)
    return [sys.executable, __file__, "--plain", str(folder)]


def vllm_command(job: Job, folder: Path) -> list[str]:
    """Run `vllm bench serve` at the same rate and lengths, with Poisson arrivals of its own."""
    rate = job.workload.requests_per_s
    return [
        *(sys.executable, str(BENCH), "--backend", "openai", "--base-url", job.host),
        *("--endpoint", "/v1/completions", "--model", job.model, "--seed", "1"),
        *("--tokenizer", str(tokenizer(folder)), "--dataset-name", "random"),
        *("--random-input-len", "16", "--random-output-len", str(OUTPUT_TOKENS)),
        *("--num-prompts", str(round(rate * job.window.end_s)), "--request-rate", str(rate)),
        *("--request-id-prefix", "bench-", "--ignore-eos", "--temperature", "0"),
        *("--save-result", "--save-detailed", "--disable-tqdm"),
        *("--result-filename", str(folder / "seen.json")),
    ]


async def plain(folder: Path) -> None:
    """Send the schedule in *folder* with aiohttp, as simply as one can."""
    import aiohttp  # noqa: PLC0415  (only this client's process needs it)

    from loadtest.client.prompts import Prompts  # noqa: PLC0415
    from loadtest.run.job import read_job  # noqa: PLC0415
    from minicluster.workload.schedule import read_schedule  # noqa: PLC0415

    job = read_job(folder / "run.json")
    requests = [r for r in read_schedule(folder / "schedule.jsonl") if r.due_s < job.window.end_s]
    prompts, url = Prompts(job), f"{job.host}/v1/completions"
    start_s = time.monotonic() + 0.5

    async def send(index: int, http: aiohttp.ClientSession) -> list[float]:
        request = requests[index]
        body = prompts.body(request, prompts.ids(request))
        await asyncio.sleep(start_s + request.due_s - time.monotonic())
        times = [time.monotonic()]
        headers = {"content-type": "application/json", "x-request-id": f"plain-{index}"}
        async with http.post(url, data=body, headers=headers) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                    times.append(time.monotonic())  # noqa: PERF401  (stamps as they come)
        return times

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        seen = await asyncio.gather(*(send(index, http) for index in range(len(requests))))
    rows = {
        "ttfts": [times[1] - times[0] for times in seen],
        "itls": [[b - a for a, b in pairwise(times[1:])] for times in seen],
    }
    (folder / "seen.json").write_text(json.dumps(rows))


def show(seen: Seen, note: str) -> None:
    """Print one row."""
    print(
        f"{seen.client:14} {seen.streams:5d} {1e3 * seen.itl_s:6.0f} {seen.events_per_s:9,.0f} "
        f"{1e3 * seen.ttft_error_p99_s:9.2f} {1e3 * seen.itl_error_p99_s:9.2f} "
        f"{seen.cpu_fraction:6.0%} {seen.events_per_s / seen.cpu_fraction:10,.0f}  {note}",
        flush=True,
    )


def raise_until_lost(client: str, seconds: float, itl_s: float) -> tuple[list[Seen], bool]:
    """
    Raise the streams by half until the client no longer follows.

    Returns:
        What was seen, and whether the client called itself saturated in the end; ours goes on
        until it does.
    """
    tried: list[Seen] = []
    streams, says_so = 60, client != "loadtest"
    while streams < MOST_STREAMS and (not tried or tried[-1].follows or not says_so):
        level = Level(streams=streams, itl_s=itl_s)
        if client == "loadtest":
            error = measure_client(level, seconds)
            tried.append(ours(error))
            says_so = error.saturated
            show(tried[-1], "saturated" if error.saturated else "")
        else:
            tried.append(other(client, level, seconds))
            show(tried[-1], "")
        streams = int(streams * 1.5)
    return tried, says_so


def main() -> int:
    """Print the figures; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--streams", default="1,50,200@0.04,200")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--itl", type=float, default=0.01, help="of the rising loads")
    parser.add_argument("-o", "--output", type=Path, help="rows as JSON")
    given = parser.parse_args()
    if given.plain:
        asyncio.run(plain(given.plain))
        return 0
    print("client       streams ITL ms  events/s TTFT p99  ITL p99  of a core  events/s/core")
    missed, rows = 0, []
    for level in parse_streams(given.streams):
        error = measure_client(level, given.seconds)
        most = FIGURES.get((level.streams, level.itl_s))
        ok = most is None or (
            error.itl_error_p99_s <= most[0]
            and error.ttft_error_p99_s <= most[1]
            and (most[2] or not error.saturated)
        )
        missed += not ok
        rows.append(ours(error))
        limit = f"(allowed ITL {1e3 * most[0]:g}, TTFT {1e3 * most[1]:g} ms) " if most else ""
        show(rows[-1], limit + ("ok" if ok else "MISSED") + " saturated" * error.saturated)
    print(f"rising loads, a token every {1e3 * given.itl:g} ms, until ITL p99 is off by 3 ms")
    for client in ("loadtest", "plain asyncio", "vllm bench"):
        tried, says_so = raise_until_lost(client, given.seconds, given.itl)
        rows += tried
        if not says_so:
            missed += 1
            print(f"  {client}: MISSED, {tried[-1].streams} streams and never marked saturated")
        held = [seen for seen in tried if seen.follows]
        if held:
            best = held[-1]
            per_core = best.events_per_s / best.cpu_fraction
            print(f"  {client}: follows {best.events_per_s:,.0f} events/s, {per_core:,.0f} a core")
        else:
            print(f"  {client}: lost at the first load")
    if given.output:
        given.output.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
