"""The client against the bundled server: what is sent, and what is kept."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import gevent
import psutil
import pytest

from loadtest.client.dispatcher import Dispatcher
from loadtest.client.launch import launch_client
from loadtest.run.folder import prepare, read_run
from loadtest.run.run_config import RunLength
from loadtest.run.schedule import ArrivalShape
from loadtest.selftest.mock_server import MockConfig
from loadtest.selftest.selftest import mock_server, read_truth
from minicluster.errors import Exit
from minicluster.workload.sources import RequestSource
from tests.loadtest.command import FAST, ServerStarter
from tests.loadtest.made import judged
from tests.loadtest.sending import order, send

FEW = RunLength(num_requests=5, warmup_s=0)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
def test_what_is_measured_is_what_the_server_did(tmp_path: Path, tokens_per_chunk: int) -> None:
    """
    Tokens have the times at which the server sent them, by its own log; merged or not.

    An early empty chunk is no token. The median is compared: either process may be kept from
    running between a stamp and what it stamps.
    """
    log = tmp_path / "log"
    does = MockConfig(**FAST, tokens_per_chunk=tokens_per_chunk, early_chunk=1)
    with mock_server(does, log) as host:
        run = send(order(host, RunLength(num_requests=40, warmup_s=0)), tmp_path / "run")
    truth, origin_s = read_truth(log), run.client.origin_monotonic_s
    chunks = [tokens_per_chunk] * (10 // tokens_per_chunk) + [10 % tokens_per_chunk]

    assert len(run.measured) == 40
    for s in run.measured:
        assert s.chunk_tokens == tuple(filter(None, chunks))
        assert (s.input_tokens, s.output_tokens) == (s.asked_input_tokens, 10)
        assert s.ttft_s >= s.ttft_send_s >= 0.05 + 0.01 * (tokens_per_chunk - 1) - 0.001
    errors_s = [
        abs(origin_s + seen - sent)
        for s in run.measured
        for seen, sent in zip(s.chunk_s, truth[s.index].chunk_s, strict=True)
    ]
    assert statistics.median(errors_s) < 0.002
    stamps = [truth[s.index].chunk_s for s in run.measured]
    own_s = [(sent[-1] - sent[0]) / (10 - tokens_per_chunk) for sent in stamps]
    tpots_s = [s.tpot_s or 0 for s in run.measured]
    assert statistics.median(tpots_s) == pytest.approx(statistics.median(own_s), rel=0.05)
    assert statistics.median(own_s) == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize(
    ("source", "vocab_size"),
    [
        (RequestSource(users=3, think_s=0.05), 500),
        (RequestSource(turns=3, think_s=0.05), 500),
        (RequestSource(turns=3, think_s=0.05), 8),
    ],
    ids=["users", "turns", "turns of answers that are no ids of ours"],
)
def test_what_follows_waits_for_its_answer(
    start_server: ServerStarter, tmp_path: Path, source: RequestSource, vocab_size: int
) -> None:
    """A closed loop has as many requests in flight as it has users; a turn contains the last."""
    extent = RunLength(num_requests=60, warmup_s=None if source.users else 0.3)
    shape = ArrivalShape(source=source)
    run = send(order(start_server(**FAST), extent, shape=shape, vocab_size=vocab_size), tmp_path)
    samples = {s.index: s for s in run.samples}
    followed = [
        (samples[r.previous], samples[r.index], r.think_s)
        for r in run.schedule
        if r.previous in samples and r.index in samples
    ]
    in_flight = [(s.send_s, 1) for s in run.samples] + [(s.end_s, -1) for s in run.samples]

    assert len(run.measured) >= 60
    assert all(s.ok and s.input_tokens == s.asked_input_tokens for s in run.measured)
    assert len(followed) > 30
    assert all(later.due_s >= before.end_s + think_s - 1e-3 for before, later, think_s in followed)
    if source.users:
        assert max(itertools.accumulate(step for _, step in sorted(in_flight))) <= 3
        assert run.client.connections == 3
    else:
        assert all(b.asked_input_tokens > a.asked_input_tokens + 10 for a, b, _ in followed)


def test_open_loop_stays_open(start_server: ServerStarter, tmp_path: Path) -> None:
    """While the server answers nobody requests go out all the same, and the p99 holds the wait."""
    host = start_server(**FAST, stall_at_s=0.0, stall_s=2.5)
    run = send(order(host, RunLength(duration_s=1.0, warmup_s=0.0)), tmp_path)
    first_s = min(s.chunk_s[0] for s in run.measured)
    waits = judged(run).latency["ttft"]

    assert sum(s.send_s < first_s for s in run.measured) == len(run.measured) > 30
    assert waits.p99_s > 1.0


@pytest.mark.parametrize(
    ("timing", "phases_s"),
    [
        ("", {"prefill_queue": 0.0, "prefill": 0.05, "handoff": 0.0015}),
        (f"., kept;dur=50, point;dur=., version;dur=1.2.3, ever;dur={'9' * 400}", {"kept": 0.05}),
    ],
    ids=["whole", "wrong in part"],
)
def test_the_servers_phases_are_kept(
    start_server: ServerStarter, tmp_path: Path, timing: str, phases_s: dict[str, float]
) -> None:
    """A Server-Timing header is in each sample, in seconds; what is no number is left out."""
    run = send(order(start_server(**FAST, timing=timing), FEW), tmp_path)

    assert all(s.ok and s.phases_s == phases_s for s in run.measured)


@pytest.mark.parametrize(
    ("behaviour", "outcome", "says"),
    [
        ({"endless": 1}, "timeout", "no end after 1 s"),
        ({"cut_after_tokens": 4}, "cut", ""),
        ({"garbage": "text"}, "malformed", "not JSON"),
        ({"garbage": "line", "endless": 1}, "malformed", "16 MiB"),
        ({"fail_every": 1, "status": 307}, "bad_status", "307"),
        ({"fail_every": 1, "status": 500}, "bad_status", "configured to fail"),
        ({"fail_every": 1, "status": 429}, "shed", "429"),
    ],
)
def test_bad_answers_have_names(
    start_server: ServerStarter, tmp_path: Path, behaviour: dict[str, Any], outcome: str, says: str
) -> None:
    """However a server misbehaves, each request ends under its name, and the run as failed."""
    # A line without an end is given up, however long a request may take.
    timeout_s = 300.0 if "garbage" in behaviour else 1.0
    extent = RunLength(num_requests=3, warmup_s=0.1, timeout_s=timeout_s)
    run = send(order(start_server(**FAST, **behaviour), extent), tmp_path)
    verdict = judged(run)

    assert {s.outcome for s in run.measured} == {outcome}
    assert len(run.measured) == 3
    assert all(s.detail and says in s.detail for s in run.measured)
    assert run.client.stop == "complete"
    assert (verdict.verdict, verdict.exit_code) == ("failed", Exit.TARGET_FAILED)
    assert says in verdict.reasons[0]


def test_a_client_that_cannot_keep_up_says_so(start_server: ServerStarter, tmp_path: Path) -> None:
    """An event loop that is busy with something else makes a run invalid, whatever came back."""

    def keep_busy(dispatcher: Dispatcher) -> None:
        while dispatcher.window_left:
            time.sleep(0.05)  # nothing else has a turn meanwhile
            gevent.sleep(0.01)

    run = send(order(start_server(**FAST)), tmp_path, keep_busy)
    verdict = judged(run)

    assert run.client.stop == "complete"
    assert all(s.ok for s in run.measured)
    assert (verdict.verdict, verdict.exit_code) == ("invalid", Exit.INCONCLUSIVE)
    assert any("not fit: it was saturated: its timer's p90" in why for why in verdict.reasons)


def test_a_lost_worker_ends_the_run(start_server: ServerStarter, tmp_path: Path) -> None:
    """One of two workers killed: the run is invalid, what the other measured is kept."""
    lost: list[int] = []

    def lose_one(seen: dict[str, float]) -> None:
        if seen["done"] > 20 and not lost:
            me = psutil.Process()
            workers = [p for p in me.children(recursive=True) if "--worker" in p.cmdline()]
            lost.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

    long = order(start_server(**FAST), RunLength(duration_s=300.0, warmup_s=0.2), workers=2)
    prepare(tmp_path, long, long.requests(), None)
    launch_client(tmp_path, lose_one)
    run = read_run(tmp_path)

    assert lost
    assert run.client.stop == "short of a worker"
    assert sum(s.ok for s in run.samples) > 20
    assert judged(run).verdict == "invalid"
