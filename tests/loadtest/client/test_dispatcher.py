"""Errors that no code expects, and targets that are gone: every request and every run ends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from loadtest.client import dispatcher as dispatching
from loadtest.client.dispatcher import Dispatcher
from loadtest.client.prompts import Prompts
from loadtest.client.request import RequestTask
from minicluster.workload.samples import Sample
from minicluster.workload.schedule import ScheduledRequest
from tests.loadtest.made import JOB
from tests.loadtest.sending import dispatch

FIRST = ScheduledRequest(index=0, due_s=0.0, input_tokens=32, output_tokens=5, in_window=True)
THEN = replace(FIRST, index=1, previous=0)
LAST = replace(THEN, index=2, previous=1)
OTHER = replace(FIRST, index=3)


class Broken:
    """A client whose every request fails."""

    _connection_pool = SimpleNamespace(
        _resolve=list, get_socket=lambda: None, return_socket=lambda _: None
    )

    def __init__(self, error: Exception) -> None:
        self.error = error

    def request(self, *_: object, **__: object) -> None:
        raise self.error


def run(
    *requests: ScheduledRequest, error: Exception | None = None, receiving: bool = False
) -> tuple[str, list[Sample]]:
    """
    Send *requests*, until none that counts is left; return why the run ended, and what it left.

    Args:
        requests: to send, each of which fails with *error*.
        error: by default one that nobody foresaw.
        receiving: whether another stream receives tokens meanwhile.
    """

    def receive(dispatcher: Dispatcher) -> None:
        if receiving:
            dispatcher._in_flight[-1] = SimpleNamespace(stream=SimpleNamespace(chunk_s=[1e5]))

    http: Any = Broken(error or RuntimeError("out of the blue"))
    with gevent.Timeout(60):
        client, samples = dispatch(JOB, requests, http, receive)
    return client.stop, samples


def test_an_unforeseen_error_is_a_sample() -> None:
    """It is neither lost nor hidden: malformed, in its own words; and what waited goes out."""
    stop, samples = run(FIRST, THEN, LAST, OTHER)

    assert stop == "complete"
    assert sorted(s.index for s in samples) == [0, 1, 2, 3]
    assert {s.outcome for s in samples} == {"malformed"}
    assert {s.detail for s in samples} == {"RuntimeError: out of the blue"}


@pytest.mark.parametrize("place", ["send", "_send_next"])
def test_the_run_ends_without_what_could_not_be_sent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    """Where our own code breaks, nobody waits for what was to come after it; the error is shown."""

    def broken(*_: object) -> None:
        raise RuntimeError("our own mistake")

    monkeypatch.setattr(RequestTask if place == "send" else Dispatcher, place, broken)
    stop, samples = run(FIRST, THEN, LAST, OTHER)

    assert stop == "complete"
    assert len(samples) == (0 if place == "send" else 2)
    assert "our own mistake" in capfd.readouterr().err


def test_no_prompt_is_made_between_due_and_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is due goes out before the prompt of one that is not is made."""
    make, done = Prompts.ids, []

    def make_and_tell(prompts: Prompts, request: ScheduledRequest, *said: Any) -> Any:  # noqa: ANN401
        done.append(f"prompt of {request.index}")
        return make(prompts, request, *said)

    def send_and_tell(*_: object, **__: object) -> None:
        done.append("sent")
        raise RuntimeError

    monkeypatch.setattr(Prompts, "ids", make_and_tell)
    monkeypatch.setattr(Broken, "request", send_and_tell)
    run(FIRST, replace(OTHER, due_s=1000.0, in_window=False))

    assert done == ["prompt of 0", "sent", "prompt of 3"]


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError()], ids=str)
def test_a_target_that_is_gone_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Once nothing answers, the rest of the schedule is not waited for: the target died."""
    monkeypatch.setattr(dispatching, "DEAD_AFTER_S", {"refused": 0.0, "timeout": 0.0})
    requests = [replace(FIRST, index=k) for k in range(dispatching.DEAD_AFTER_REQUESTS)]
    stop, samples = run(*requests, replace(OTHER, index=99, due_s=1e5), error=error)

    assert stop == "died"
    assert [s.index for s in samples] == [r.index for r in requests]
