"""Who is there, who is lost, and what is left of the run."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.client.coordinator import Coordinator
from loadtest.run.client_health import read_client

from .jobs import CLIENT, JOB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Wire:
    """Locust's runner as far as a conductor sees it."""

    def __init__(self) -> None:
        """Keep what is sent."""
        self.heard: dict[str, Callable[..., None]] = {}
        self.sent: list[tuple[str, Any]] = []

    def register_message(self, kind: str, listener: Callable[..., None]) -> None:
        """Listen."""
        self.heard[kind] = listener

    def send_message(self, kind: str, data: object, client_id: str | None = None) -> None:
        """Send to one, or to all."""
        self.sent.append((kind, client_id or data))

    def news(self, player: str, *lines: str, left: int) -> None:
        """Let *player* say how far it is."""
        data = {"lines": lines, "t_s": 1.0, "sent": 2, "done": 1, "failed": 0, "left": left}
        self.heard["news"](msg=SimpleNamespace(node_id=player, data=data))

    def client(self, player: str, stop: str) -> None:
        """Let *player* say what it found of itself, its last word."""
        own = asdict(replace(CLIENT, stop=stop))
        self.heard["client"](msg=SimpleNamespace(node_id=player, data=own))


@pytest.fixture
def wire() -> Wire:
    """Return what connects the conductor."""
    return Wire()


@pytest.fixture
def conductor(wire: Wire, tmp_path: Path) -> Coordinator:
    """Start a run of two players."""
    conductor = Coordinator(wire, JOB, tmp_path)
    conductor.start(("a", "b"))
    return conductor


def test_a_lost_player_ends_the_run(wire: Wire, conductor: Coordinator, tmp_path: Path) -> None:
    """Who is there goes on until one is not; the others' last words are waited for, its are not."""
    wire.news("a", "1", left=5)
    wire.news("b", "2", left=5)
    conductor.reckon_with(("a", "b"))
    assert wire.sent[2:] == []
    for _ in range(2):
        conductor.reckon_with(("a",))
    assert wire.sent[2:] == [("over", {"why": "short of a worker"})]
    assert not conductor.finished.is_set()
    wire.client("a", "short of a worker")

    assert conductor.finished.is_set()
    assert read_client(tmp_path / "client.json").stop == "short of a worker"
    wire.news("b", "3", left=4)  # it was but frozen
    wire.client("b", "short of a worker")
    assert (tmp_path / "samples.jsonl").read_text() == "1\n2\n"
    assert read_client(tmp_path / "client.json").processes == 1


def test_a_player_lost_after_the_last_request(
    wire: Wire, conductor: Coordinator, tmp_path: Path
) -> None:
    """All is measured, but nobody knows whether the lost one was fit: the run says so."""
    wire.news("a", left=0)
    wire.news("b", left=0)
    assert wire.sent[2:] == [("over", {"why": "complete"})]
    wire.client("a", "complete")
    conductor.reckon_with(("a",))

    assert conductor.finished.is_set()
    assert read_client(tmp_path / "client.json").stop == "short of a worker"


def test_who_has_told_may_go(wire: Wire, conductor: Coordinator, tmp_path: Path) -> None:
    """A player that left after its last word is none that is missed."""
    wire.news("a", left=0)
    wire.news("b", left=0)
    wire.client("a", "complete")
    conductor.reckon_with(("b",))
    assert not conductor.finished.is_set()
    wire.client("b", "complete")

    assert read_client(tmp_path / "client.json").stop == "complete"


def test_an_interrupted_run_stays_one(wire: Wire, conductor: Coordinator, tmp_path: Path) -> None:
    """Why a run ended first is why it ended."""
    conductor.end("interrupted")
    wire.client("a", "interrupted")
    conductor.reckon_with(("a",))

    assert conductor.finished.is_set()
    assert read_client(tmp_path / "client.json").stop == "interrupted"


def test_between_runs_nobody_is_missed(wire: Wire, conductor: Coordinator, tmp_path: Path) -> None:
    """Workers come and go before a run and after it; the next one is whole again."""
    conductor.reckon_with(("a",))
    wire.client("a", "short of a worker")
    conductor.reckon_with(())
    conductor.finished.clear()
    conductor.start(("a", "c"))
    for player in ("a", "c"):
        wire.news(player, left=0)
    for player in ("a", "c"):
        wire.client(player, "complete")

    assert conductor.finished.is_set()
    assert read_client(tmp_path / "client.json").stop == "complete"
    assert [to for kind, to in wire.sent if kind == "cue"] == ["a", "b", "a", "c"]
