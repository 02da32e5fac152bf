"""Failures 1 to 3: of two prefill replicas one or both die or hang."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.serving.client import send

from .load import DEADLINE_S, body_of, under_way
from .processes import kill
from .processes import send as signalled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving.deployed import Split

pytestmark = [pytest.mark.engine, pytest.mark.campaign]


@pytest.fixture(autouse=True)
def whole(wide: Split) -> Iterator[None]:
    """Start and end with all replicas, and without held KV cache."""
    wide.wait_until_whole()
    yield
    wide.wait_until_whole()


@pytest.mark.parametrize("victim", ["prefill", "prefill/engine"])
def test_a_prefill_replica_dies_midway(wide: Split, victim: str) -> None:
    """
    Failure 1: one of two prefill replicas, or its engine, is killed with prompts inside.

    Expected: every request is answered, those that were inside by the other replica, and their
    answers say so; the replica comes back.
    """
    engines = wide.find("prefill/engine", "prefill/worker")
    one = engines[0].replica
    signalled(signal.SIGSTOP, *engines)
    with under_way(wide.base_url, [body_of(seed) for seed in range(6)]) as asked:
        wide.wait_until_inside(6)
        dying = [each for each in wide.find(victim) if each.replica == one]
        inside = [each for each in engines if each.replica == one]
        kill(*dying, *inside)
        signalled(signal.SIGCONT, *(each for each in engines if each.replica != one))
        replies = [each.result() for each in asked]
    assert [reply.error for reply in replies] == [None] * 6
    assert all(reply.done for reply in replies)
    ways = {reply.path for reply in replies}
    assert "retried; reason=prefill-failed" in ways
    assert ways <= {"remote", "retried; reason=prefill-failed"}
    assert max(reply.first_s for reply in replies) < 2 * DEADLINE_S


def test_a_prefill_replica_hangs(wide: Split) -> None:
    """
    Failure 1b: one of two prefill replicas stops moving.

    Expected: at half of the deadline its requests go to the other one.
    """
    engines = wide.find("prefill/engine", "prefill/worker")
    one = [each for each in engines if each.replica == engines[0].replica]
    signalled(signal.SIGSTOP, *one)
    try:
        with under_way(wide.base_url, [body_of(100 + seed) for seed in range(4)]) as asked:
            replies = [each.result() for each in asked]
    finally:
        signalled(signal.SIGCONT, *one)
    seen = [(reply.status, reply.path, reply.error) for reply in replies]
    assert all(reply.done for reply in replies), seen
    assert {reply.path for reply in replies} == {"remote", "retried; reason=prefill-timeout"}, seen
    wide.wait_until_released()


def test_all_prefill_replicas_hang(wide: Split) -> None:
    """
    Failure 1c: no prefill replica moves.

    Expected: 504 with Retry-After at the prefill deadline, and nothing is left of the request.
    """
    engines = wide.find("prefill/engine", "prefill/worker")
    signalled(signal.SIGSTOP, *engines)
    try:
        reply = send(f"{wide.base_url}/v1/completions", body_of(200))
    finally:
        signalled(signal.SIGCONT, *engines)
    assert (reply.status, reply.body["error"]["code"]) == (504, "prefill-timeout")
    assert int(reply.headers["retry-after"]) >= 1
    assert DEADLINE_S <= reply.seconds < 2 * DEADLINE_S
    wide.wait_until_released()


def test_all_prefill_replicas_are_gone(wide: Split) -> None:
    """
    Failure 2: no prefill replica lives.

    Expected: by the policy `fail` 503 at once, with Retry-After; by `local` an answer that says
    that decode computed the prompt; both until the replicas are back, then as ever.
    """
    url = f"{wide.base_url}/v1/completions"
    kill(*wide.find("prefill", "prefill/engine", "prefill/worker"))
    first = send(url, body_of(300))
    again = send(url, body_of(301))
    phases, *events = wide("answer", "completions", body_of(302), 9.0, {"fallback": "local"})
    for reply in (first, again):
        assert (reply.status, reply.body["error"]["code"]) == (503, "no-prefill-replica"), (
            reply.body
        )
        assert int(reply.headers["retry-after"]) >= 1
    assert again.seconds < DEADLINE_S  # it waits for nothing
    assert (phases["path"], phases["reason"]) == ("fallback-local", "no-prefill-replica")
    assert events[-1] == ["data: [DONE]\n\n"]
    wide.wait_until_whole()
    # Failure 3: the new replicas listen at the ports of the old ones.
    replies = [send(url, body_of(310 + seed)) for seed in range(4)]
    assert [(reply.done, reply.path) for reply in replies] == [(True, "remote")] * 4
