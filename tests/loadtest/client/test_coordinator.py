"""A coordinator with workers that report, leave and get lost, and what it keeps of the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.client.coordinator import Coordinator
from loadtest.run.client_health import read_client
from tests.loadtest.made import CLIENT, JOB


class Wire:
    """Locust's runner as the coordinator sees it."""

    def __init__(self) -> None:
        self.heard: dict[str, Callable[..., None]] = {}
        self.sent: list[tuple[str, Any]] = []

    def register_message(self, kind: str, listener: Callable[..., None]) -> None:
        self.heard[kind] = listener

    def send_message(self, kind: str, data: object, client_id: str | None = None) -> None:
        self.sent.append((kind, client_id or data))

    def report(self, worker: str, *lines: str, left: int) -> None:
        data = {"lines": lines, "t_s": 1.0, "sent": 2, "done": 1, "failed": 0, "left": left}
        self.heard["progress"](msg=SimpleNamespace(node_id=worker, data=data))

    def client(self, worker: str, stop: str) -> None:
        own = asdict(replace(CLIENT, stop=stop))
        self.heard["client"](msg=SimpleNamespace(node_id=worker, data=own))


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def coordinator(wire: Wire, tmp_path: Path) -> Coordinator:
    """Start a run of two workers."""
    coordinator = Coordinator(wire, JOB, tmp_path)
    coordinator.start(("a", "b"))
    return coordinator


def test_a_lost_worker_ends_the_run(wire: Wire, coordinator: Coordinator, tmp_path: Path) -> None:
    """A run goes on until a worker is missing; then the others' final reports are awaited."""
    wire.report("a", "1", left=5)
    wire.report("b", "2", left=5)
    coordinator.drop_missing(("a", "b"))
    assert wire.sent[2:] == []
    for _ in range(2):
        coordinator.drop_missing(("a",))
    assert wire.sent[2:] == [("end_run", {"reason": "short of a worker"})]
    assert not coordinator.finished.is_set()
    wire.client("a", "short of a worker")

    assert coordinator.finished.is_set()
    assert read_client(tmp_path / "client.json").stop == "short of a worker"
    wire.report("b", "3", left=4)  # it was but frozen
    wire.client("b", "short of a worker")
    assert (tmp_path / "samples.jsonl").read_text() == "1\n2\n"
    assert read_client(tmp_path / "client.json").processes == 1


@pytest.mark.parametrize(
    ("left", "end", "stop"),
    [
        ("b", "complete", "short of a worker"),
        ("a", "complete", "complete"),
        ("b", "interrupted", "interrupted"),
    ],
    ids=["silent", "reported", "interrupted"],
)
def test_a_worker_that_leaves_after_the_last_request(
    wire: Wire, coordinator: Coordinator, tmp_path: Path, left: str, end: str, stop: str
) -> None:
    """It is missing unless its final report has come; an interrupted run stays one."""
    if end == "interrupted":
        coordinator.end(end)
    else:
        for worker in ("a", "b"):
            wire.report(worker, left=0)
    assert wire.sent[2:] == [("end_run", {"reason": end})]
    wire.client("a", end)
    coordinator.drop_missing(tuple({"a", "b"} - {left}))
    assert coordinator.finished.is_set() == (left == "b")
    if left == "a":
        wire.client("b", "complete")

    assert coordinator.finished.is_set()
    assert read_client(tmp_path / "client.json").stop == stop


def test_a_run_whose_folder_is_gone_ends(wire: Wire, tmp_path: Path) -> None:
    """Results that cannot be written are an error."""
    folder = tmp_path / "run"
    folder.mkdir()
    coordinator = Coordinator(wire, JOB, folder)
    coordinator.start(("a",))
    shutil.rmtree(folder, ignore_errors=True)
    wire.report("a", "1", left=0)
    wire.client("a", "complete")

    assert coordinator.finished.is_set()
    assert str(folder) in str(coordinator.write_error)
