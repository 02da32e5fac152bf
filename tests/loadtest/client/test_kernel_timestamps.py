"""When bytes arrived: the kernel knows, however late they are read."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import gevent
import pytest

from loadtest.client import kernel_timestamps
from loadtest.client.dispatcher import Dispatcher
from loadtest.client.kernel_timestamps import enable_timestamps, receive
from loadtest.run.run_config import RunLength
from loadtest.selftest.mock_server import MockConfig
from loadtest.selftest.selftest import mock_server, read_truth
from tests.loadtest.sending import order, send

LATE_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection; what the second receives is stamped, from now on."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
    ):
        far, _ = listener.accept()
        with far:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enable_timestamps(far)
            for _ in range(1000):  # the kernel begins to stamp a moment after it was asked to
                near.send(b"?")
                if receive(far, 1)[1].by_kernel:
                    break
                time.sleep(0.001)
            yield near, far


def test_a_late_reader_is_told_when_bytes_came(ends: tuple[socket.socket, socket.socket]) -> None:
    """The stamp lies between send and sent of the last segment, not where they were read."""
    near, far = ends
    near.send(b"to")
    time.sleep(LATE_S)
    before_s = time.monotonic()
    near.send(b"ken")
    sent_s = time.monotonic()
    time.sleep(LATE_S)
    received, came = receive(far, 100)

    assert received == b"token"
    assert came.by_kernel
    assert before_s - 0.001 <= came.at_s <= sent_s + LATE_S / 2


@pytest.mark.parametrize("set_by_s", [3600.0, 2.0, -3600.0])
def test_a_wall_clock_that_was_set_stamps_nothing(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, set_by_s: float
) -> None:
    """Kernel stamps are wall-clock times; between arrival and reading that may be changed."""
    near, far = ends
    near.send(b"token")
    wall_s = time.time()
    monkeypatch.setattr(kernel_timestamps, "time", lambda: wall_s + set_by_s)
    before_s = time.monotonic()
    _, came = receive(far, 100)

    assert not came.by_kernel
    assert before_s <= came.at_s <= time.monotonic()


def test_without_stamps_the_reader_tells() -> None:
    """The end of a connection is empty."""
    near, far = socket.socketpair()
    with far:
        near.send(b"token")
        before_s = time.monotonic()
        received, came = receive(far, 100)
        near.close()
        assert receive(far, 100)[0] == b""

    assert received == b"token"
    assert not came.by_kernel
    assert before_s <= came.at_s <= time.monotonic()


def test_gaps_are_right_though_the_reader_wakes_late(tmp_path: Path) -> None:
    """
    A client that is busy for eight tenths of the time still says when each token came.

    Its rhythm is not that of the tokens: as they are read, half of the gaps are off by 29 ms. A
    server that other processes stop between its log and its write is tried again.
    """

    def keep_busy(dispatcher: Dispatcher) -> None:
        while dispatcher.window_left:
            time.sleep(0.08)  # nothing else has a turn meanwhile
            gevent.sleep(0.02)

    medians = []
    for attempt in range(5):
        log = tmp_path / f"log-{attempt}"
        with mock_server(MockConfig(ttft_s=0.1, itl_s=0.13), log) as host:
            job = order(host, RunLength(num_requests=1, warmup_s=0))
            run = send(job, tmp_path / f"run-{attempt}", keep_busy)
        (sample,) = run.measured
        assert run.client.stamps == "kernel"
        assert run.client.heartbeat_lag_s[-1] > 0.04
        true_gaps = [b - a for a, b in pairwise(read_truth(log)[sample.index].chunk_s)]
        errors = sorted(abs(a - b) for a, b in zip(sample.gaps_s, true_gaps, strict=True))
        medians.append(errors[len(errors) // 2])
        if medians[-1] < 0.01:
            break
    assert min(medians) < 0.01
