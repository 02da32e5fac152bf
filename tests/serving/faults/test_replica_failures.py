"""Failures 1 to 4 and 13: replicas, engines, the controller or the endpoint die or hang."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.serving.client import send
from tests.serving.deployed import until

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
    wide.wait_until_released()


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


@pytest.mark.parametrize("victim", ["decode", "decode/engine"])
def test_decode_dies_midway(wide: Split, victim: str) -> None:
    """
    Failure 4: decode's replica, or its engine, is killed while it streams.

    Expected: each stream ends with an error event and without [DONE]; a request that is no stream
    gets a 5xx; prefill is not hurt, its blocks are free after the lease; decode comes back.
    """
    prefill = {each.pid for each in wide.find("prefill")}
    bodies = [body_of(1000 + seed, max_tokens=1500) for seed in range(3)]
    bodies.append(body_of(1003, max_tokens=1500, stream=False))
    with under_way(wide.base_url, bodies) as asked:
        wide.wait_until_decoding(4)
        kill(*wide.find(victim))
        *streams, whole = [each.result() for each in asked]
    for reply in streams:
        assert reply.status == 200
        assert len(reply.events) > 1
        assert "[DONE]" not in reply.events
        assert reply.error
        assert "Traceback" not in reply.error
    assert whole.status >= 500
    assert whole.error
    assert {each.pid for each in wide.find("prefill")} == prefill
    wide.wait_until_whole()
    assert send(f"{wide.base_url}/v1/completions", body_of(1004)).done


def test_decode_hangs(wide: Split) -> None:
    """
    Failure 4b: decode's replica stops moving, and an answer in one piece is wanted.

    Expected: 504 with Retry-After once both deadlines and the time of its tokens have passed.
    """
    frozen = wide.find("decode", "decode/engine", "decode/worker")
    signalled(signal.SIGSTOP, *frozen)
    try:
        url = f"{wide.base_url}/v1/completions"
        reply = send(url, body_of(1200, max_tokens=2, stream=False))
    finally:
        signalled(signal.SIGCONT, *frozen)
    assert (reply.status, reply.body["error"]["code"]) == (504, "answer-timeout")
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.seconds >= 2 * DEADLINE_S


@pytest.mark.parametrize("victim", ["controller", "ingress"])
def test_the_managers_die(wide: Split, victim: str) -> None:
    """
    Failure 13: Ray Serve's controller, or our endpoint, is killed.

    Expected: at most the requests under way break; new ones are answered again, without anybody's
    doing; the engines are not touched.
    """
    engines = {each.pid for each in wide.find("prefill/engine", "decode/engine")}
    kill(*wide.find(victim))
    url = f"{wide.base_url}/v1/completions"
    until(lambda: send(url, body_of(1100), timeout_s=10).done, "an answer")
    wide.wait_until_whole()
    assert {each.pid for each in wide.find("prefill/engine", "decode/engine")} == engines
