"""
Open loop stays open: a server that stalls, and the arrivals that keep their schedule.

    python benchmarks/open_loop.py

Poisson arrivals at 5 to 75 requests/s against the bundled server, which sends nothing for 2 s in
the middle. The gaps between sends are tested against the exponential (Kolmogorov-Smirnov, 5 %
level), and the reported p99 has to hold the stall.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from loadtest.client.launch import launch_client
from loadtest.run.folder import Run, prepare, read_run
from loadtest.run.run_config import RunLength, free_load, make_job
from loadtest.selftest.mock_stream import MockConfig
from loadtest.selftest.selftest import mock_server
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.stats.quantiles import quantile

STALL_AT_S, STALL_S = 5.0, 2.0
RATES = (5.0, 10.0, 20.0, 40.0, 75.0)
LEVEL = 1.358
"""Quantile of the Kolmogorov distribution at 5 % for large samples."""


def stalled(rate: float, duration_s: float, folder: Path) -> Run:
    """Load a server that stalls in the middle."""
    workload = WorkloadSpec(
        requests_per_s=rate, input_tokens=Lengths.fixed(16), output_tokens=Lengths.fixed(10)
    )
    load = free_load(workload, SloSpec(), model="fake", vocab_size=1000)
    behaviour = MockConfig(ttft_s=0.1, itl_s=0.02, stall_at_s=STALL_AT_S, stall_s=STALL_S)
    with mock_server(behaviour, folder / "truth.jsonl") as host:
        extent = RunLength(duration_s=duration_s, warmup_s=1.0)
        job = make_job(load, extent, host=host, model="fake")
        prepare(folder, job, job.requests(), None)
        launch_client(folder, lambda _: None)
    return read_run(folder)


def distance(gaps_s: np.ndarray[tuple[int], np.dtype[np.float64]], rate: float) -> float:
    """Return the largest distance of the gaps' distribution from the exponential's."""
    gaps_s = np.sort(gaps_s)
    expected = 1 - np.exp(-rate * gaps_s)
    steps = np.arange(1, len(gaps_s) + 1) / len(gaps_s)
    return float(np.max(np.maximum(steps - expected, expected - steps + 1 / len(gaps_s))))


def main() -> int:
    """Print a row each rate; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0, help="at each rate")
    given = parser.parse_args()
    failed = 0
    print("rate/s  sends  KS distance  5 % level  dispatch lag p99  TTFT p99  sent in the stall")
    for rate in RATES:
        with tempfile.TemporaryDirectory(prefix="open-loop-") as name:
            run = stalled(rate, given.seconds, Path(name))
        sends = np.sort([s.send_s for s in run.samples])
        d, most = distance(np.diff(sends), rate), LEVEL / np.sqrt(len(sends) - 1)
        p99_s = quantile([s.ttft_s for s in run.measured], 0.99)
        lag_s = quantile([s.send_s - s.due_s for s in run.samples], 0.99)
        first_s = min(s.chunk_s[0] for s in run.samples if s.chunk_s)
        from_s = first_s + STALL_AT_S
        inside = int(np.sum((sends >= from_s) & (sends < from_s + STALL_S)))
        held = d < most and p99_s > STALL_S / 2
        failed += not held
        print(
            f"{rate:6g} {len(sends):6d} {d:12.3f} {most:10.3f} {1e3 * lag_s:14.2f} ms "
            f"{p99_s:7.2f} s {inside:8d} of {rate * STALL_S:.0f}   {'ok' if held else 'FAILED'}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
