"""The client process, or several, against the bundled server: what is sent, and what is kept."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from loadtest.client import health
from loadtest.comparison import TOLERANCE
from loadtest.drive import drive
from loadtest.order import Extent, free_load, make_job
from loadtest.run import Run, prepare, read_run
from loadtest.schedule import Shape
from loadtest.verdict import conclude
from sizing.sources import Source
from sizing.specs.slo import SloSpec
from sizing.specs.workload import Lengths, WorkloadSpec

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import ServerStarter

    from loadtest.drive import Progress

FAST = {"ttft_s": 0.05, "itl_s": 0.01}
WORKLOAD = WorkloadSpec(
    requests_per_s=60.0,
    input_tokens=Lengths(distribution="uniform", low=16, high=64),
    output_tokens=Lengths.fixed(10),
)
SOME = Extent(num_requests=60, warmup_s=0.3)


def go(  # noqa: PLR0913  (each test names what it is about)
    host: str,
    folder: Path,
    extent: Extent = SOME,
    *,
    source: Source | None = None,
    rate: float = 60.0,
    workers: int = 1,
    on_progress: Any = None,  # noqa: ANN401  (a callback, or none)
) -> Run:
    """Run a job to its end and read it."""
    load = free_load(
        replace(WORKLOAD, requests_per_s=rate), SloSpec(), model="fake", vocab_size=500
    )
    shape = Shape(source=source or Source())
    job = make_job(load, extent, host=host, model="fake", shape=shape, workers=workers)
    prepare(folder, job, job.requests(), None)
    drive(folder, on_progress or (lambda _: None))
    return read_run(folder)


def test_workers_share_one_schedule(start_server: ServerStarter, tmp_path: Path) -> None:
    """Two processes send, between them, each request of the one schedule once, when it is due."""
    run = go(start_server(**FAST), tmp_path, workers=2)
    due = {r.index: r.due_s for r in run.schedule}

    assert run.client.processes == 2
    assert len({s.index for s in run.samples}) == len(run.samples)
    assert {s.index for s in run.samples} >= {r.index for r in run.schedule if r.in_window}
    assert all(s.ok for s in run.measured)
    assert all(s.due_s == pytest.approx(due[s.index], abs=1e-6) for s in run.samples)
    assert all(s.send_s >= s.due_s - 1e-6 for s in run.samples)


def test_users_wait_for_their_answers(start_server: ServerStarter, tmp_path: Path) -> None:
    """A closed loop has as many requests in flight as it has users, each after its last answer."""
    users = Source(users=3, think_s=0.05)
    run = go(start_server(**FAST), tmp_path, Extent(num_requests=30), source=users)
    samples = {s.index: s for s in run.samples}
    followed = [
        (samples[r.previous], samples[r.index])
        for r in run.schedule
        if r.previous in samples and r.index in samples
    ]

    assert len(run.measured) == 30
    assert len(followed) > 30
    assert all(later.due_s >= before.end_s + 0.05 - 1e-3 for before, later in followed)
    in_flight = [(s.send_s, 1) for s in run.samples] + [(s.end_s, -1) for s in run.samples]
    assert max(itertools.accumulate(step for _, step in sorted(in_flight))) <= 3
    assert run.job.window.length_s > 0


def test_turns_follow_each_other(start_server: ServerStarter, tmp_path: Path) -> None:
    """Each turn of a conversation is sent after the last one, and is as long as all before it."""
    run = go(start_server(**FAST), tmp_path, source=Source(turns=3, think_s=0.02))
    samples = {s.index: s for s in run.samples}
    turns = [
        (samples[r.previous], samples[r.index])
        for r in run.schedule
        if r.in_window and r.previous is not None
    ]

    assert len(run.measured) >= 60
    assert all(s.ok and s.input_tokens == s.asked_input_tokens for s in run.measured)
    assert all(b.due_s >= a.end_s for a, b in turns)
    assert all(b.asked_input_tokens > a.asked_input_tokens + 10 for a, b in turns)


def test_connections_are_used_again(start_server: ServerStarter, tmp_path: Path) -> None:
    """One user keeps its connection; the run says how many were opened."""
    run = go(start_server(**FAST), tmp_path, Extent(num_requests=8), source=Source(users=1))

    assert len(run.samples) > 8
    assert run.client.connections == 1


def test_the_servers_phases_are_kept(start_server: ServerStarter, tmp_path: Path) -> None:
    """A Server-Timing header is in each sample, in seconds."""
    run = go(start_server(**FAST), tmp_path, Extent(num_requests=5, warmup_s=0))

    assert all(s.phases_s == {"prefill": 0.05, "handoff": 0.0015} for s in run.measured)


def test_durations_that_are_none_are_left_out(start_server: ServerStarter, tmp_path: Path) -> None:
    """A Server-Timing header that is wrong in part costs that part, not the answer."""
    timing = f"., kept;dur=50, point;dur=., version;dur=1.2.3, ever;dur={'9' * 400}"
    extent = Extent(num_requests=5, warmup_s=0)
    run = go(start_server(**FAST, timing=timing), tmp_path, extent)

    assert all(s.ok and s.phases_s == {"kept": 0.05} for s in run.measured)


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        ({"endless": 1}, "timeout"),
        ({"mute_after_tokens": 4}, "timeout"),
        ({"cut_after_tokens": 4}, "cut"),
        ({"garbage": "text"}, "malformed"),
        ({"garbage": "deep"}, "malformed"),
        ({"garbage": "leap"}, "malformed"),
        ({"flood": 1, "endless": 1}, "timeout"),
        ({"usage": 0}, "no_usage"),
        ({"fail_every": 1, "status": 307}, "bad_status"),
        ({"fail_every": 1, "status": 500}, "bad_status"),
        ({"fail_every": 1, "status": 429}, "shed"),
    ],
)
def test_bad_answers_have_names(
    start_server: ServerStarter, tmp_path: Path, behaviour: dict[str, Any], outcome: str
) -> None:
    """However a server misbehaves, each request ends, under its name, and the run does, too."""
    extent = Extent(num_requests=10, warmup_s=0.1, timeout_s=1.0)
    run = go(start_server(**FAST, **behaviour), tmp_path, extent)

    assert {s.outcome for s in run.measured} == {outcome}
    assert len(run.measured) == 10
    assert all(s.detail for s in run.measured)
    assert run.client.stop == "complete"


def test_a_line_without_end_is_given_up(start_server: ServerStarter, tmp_path: Path) -> None:
    """Bytes that come to nothing are not kept for ever, however long a request may take."""
    extent = Extent(num_requests=3, warmup_s=0.0, timeout_s=300.0)
    run = go(start_server(**FAST, garbage="line", endless=1), tmp_path, extent, rate=5)

    assert {s.outcome for s in run.measured} == {"malformed"}
    assert all("16 MiB" in (s.detail or "") for s in run.measured)


def test_slow_server_is_not_the_clients_fault(start_server: ServerStarter, tmp_path: Path) -> None:
    """Where a server has too few slots, requests go out on schedule and wait there."""
    run = go(start_server(**FAST, slots=3), tmp_path, Extent(duration_s=1.5, warmup_s=0.0))
    in_order = sorted(run.measured, key=lambda s: s.due_s)

    assert all(s.ok for s in run.measured)
    assert in_order[-1].ttft_s > 0.5
    assert sum(s.send_s - s.due_s < 0.25 for s in run.measured) > 0.9 * len(run.measured)


def test_a_rate_that_the_client_cannot_send(start_server: ServerStarter, tmp_path: Path) -> None:
    """More requests a second than a process can send: it says that it was not fit, and ends."""
    extent = Extent(duration_s=0.5, warmup_s=0.1, timeout_s=20.0)
    run = go(start_server(ttft_s=0.01, itl_s=0.001), tmp_path, extent, rate=8000)
    own = health(run.client, run.measured, run.job.slo)

    assert own.problems
    assert run.client.stop == "complete"
    assert run.samples


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_ends_the_run(
    start_server: ServerStarter, tmp_path: Path, number: signal.Signals
) -> None:
    """One of two workers killed or frozen: the run is invalid, what the other measured is kept."""
    lost: list[int] = []

    def lose_one(seen: Progress) -> None:
        if seen.done > 20 and not lost:
            me = psutil.Process()
            workers = [p for p in me.children(recursive=True) if "--worker" in p.cmdline()]
            lost.append(workers[0].pid)
            os.kill(workers[0].pid, number)

    long = Extent(duration_s=60.0, warmup_s=0.2)
    run = go(start_server(**FAST), tmp_path, long, workers=2, on_progress=lose_one)

    assert lost
    assert run.client.stop == "short of a worker"
    assert sum(s.ok for s in run.samples) > 20
    assert conclude(run, TOLERANCE, require_prediction=False).verdict == "invalid"
