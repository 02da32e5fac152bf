"""A coordinator with workers that report, leave and get lost, and what it keeps of the run."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.client.coordinator import Coordinator
from loadtest.run.client_health import KILLED, UNWRITABLE, read_client
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


def test_no_worker_is_missing_between_runs(
    wire: Wire, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Workers come and go before a run and after it; the next one is whole again."""
    coordinator.drop_missing(("a",))
    wire.client("a", "short of a worker")
    coordinator.drop_missing(())
    coordinator.finished.clear()
    coordinator.start(("a", "c"))
    for worker in ("a", "c"):
        wire.report(worker, left=0)
    for worker in ("a", "c"):
        wire.client(worker, "complete")

    assert coordinator.finished.is_set()
    assert read_client(tmp_path / "client.json").stop == "complete"
    assert [to for kind, to in wire.sent if kind == "start_run"] == ["a", "b", "a", "c"]


def test_a_full_disk_ends_the_run_and_keeps_its_samples(
    wire: Wire, coordinator: Coordinator, tmp_path: Path
) -> None:
    """The run ends at the first sample without room; there is some again at the end."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    samples = tmp_path / "samples.jsonl"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
        wire.report("a", "first", left=5)
        wire.report("b", "second", left=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert samples.read_text() == "first"
    assert wire.sent[2:] == [("end_run", {"reason": UNWRITABLE})]
    wire.report("a", "third", left=4)
    assert read_client(tmp_path / "client.json").stop == KILLED
    for worker in ("a", "b"):
        wire.client(worker, UNWRITABLE)

    assert coordinator.finished.is_set()
    assert samples.read_text() == "first\nsecond\nthird\n"
    assert read_client(tmp_path / "client.json").stop == UNWRITABLE
    assert isinstance(coordinator.write_error, OSError)


@pytest.mark.parametrize("gone", ["before the start", "during the run"])
def test_a_run_whose_folder_is_gone_ends(wire: Wire, tmp_path: Path, gone: str) -> None:
    """Results that cannot be written are an error; late reports are dropped."""
    folder = tmp_path / "run"
    if gone == "during the run":
        folder.mkdir()
    coordinator = Coordinator(wire, JOB, folder)
    coordinator.start(("a",))
    shutil.rmtree(folder, ignore_errors=True)
    wire.report("a", "1", left=0)
    wire.client("a", "complete")

    assert coordinator.finished.is_set()
    assert str(folder) in str(coordinator.write_error)

    folder.mkdir()
    coordinator.drop_missing(())
    coordinator.finished.clear()
    coordinator.start(("b",))
    wire.client("b", "complete")
    assert coordinator.finished.is_set()
    assert read_client(folder / "client.json").stop == "complete"
