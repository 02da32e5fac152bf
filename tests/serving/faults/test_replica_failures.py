"""Failures 1 to 4 and 13: replicas, engines, the controller or the endpoint die or hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.serving.client import send
from tests.serving.deployed import Split
from tests.waiting import until

from .load import DEADLINE_S, body_of, refused, under_way
from .processes import kill, stopped

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
    """Failure 1: a prefill replica, or its engine, is killed: the other answers, and says so."""
    engines = wide.find("prefill/engine", "prefill/worker")
    one = engines[0].replica
    with ExitStack() as requests:
        with stopped(*engines):
            bodies = [body_of(seed) for seed in range(6)]
            asked = requests.enter_context(under_way(wide.base_url, bodies))
            wide.wait_until_inside(6)
            kill(*(each for each in [*wide.find(victim), *engines] if each.replica == one))
        replies = [each.result() for each in asked]
    assert [reply.error for reply in replies] == [None] * 6
    assert all(reply.done for reply in replies)
    ways = {reply.path for reply in replies}
    assert "retried; reason=prefill-failed" in ways
    assert ways <= {"remote", "retried; reason=prefill-failed"}
    assert max(reply.first_s for reply in replies) < 2 * DEADLINE_S


def test_a_prefill_replica_hangs(wide: Split) -> None:
    """Failure 1b: a replica stands still: at half of the deadline the other one answers."""
    engines = wide.find("prefill/engine", "prefill/worker")
    one = [each for each in engines if each.replica == engines[0].replica]
    bodies = [body_of(100 + seed) for seed in range(4)]
    with stopped(*one), under_way(wide.base_url, bodies) as asked:
        replies = [each.result() for each in asked]
    seen = [(reply.status, reply.path, reply.error) for reply in replies]
    assert all(reply.done for reply in replies), seen
    assert {reply.path for reply in replies} == {"remote", "retried; reason=prefill-timeout"}, seen


def test_all_prefill_replicas_are_gone(wide: Split) -> None:
    """
    Failures 2 and 3: no prefill replica lives, until new ones listen at the ports of the old ones.

    By the policy `fail` requests get 503 at once, with Retry-After; by `local` decode computes the
    prompt, and the answer says so.
    """
    url = f"{wide.base_url}/v1/completions"
    kill(*wide.find("prefill", "prefill/engine", "prefill/worker"))
    first = send(url, body_of(300))
    again = send(url, body_of(301))
    phases, *events = wide("answer", "completions", body_of(302), 9.0, {"fallback": "local"})
    assert all(refused(reply, 503, "no-prefill-replica") for reply in (first, again))
    assert again.seconds < DEADLINE_S  # it waits for nothing
    assert (phases["path"], phases["reason"]) == ("fallback-local", "no-prefill-replica")
    assert events[-1] == "data: [DONE]\n\n"
    wide.wait_until_whole()
    # Failure 3: the new replicas listen at the ports of the old ones.
    replies = [send(url, body_of(310 + seed)) for seed in range(4)]
    assert [(reply.done, reply.path) for reply in replies] == [(True, "remote")] * 4


@pytest.mark.parametrize("victim", ["decode", "decode/engine"])
def test_decode_dies_midway(wide: Split, victim: str) -> None:
    """
    Failure 4: decode's replica, or its engine, is killed while it streams.

    Each stream ends with an error event and without [DONE]; a request that is no stream gets a
    5xx; prefill is not hurt, its blocks are free after the lease; decode comes back.
    """
    prefill = {each.pid for each in wide.find("prefill")}
    bodies = [body_of(1000 + seed, max_tokens=1500) for seed in range(3)]
    bodies.append(body_of(1003, max_tokens=1500, stream=False))
    with under_way(wide.base_url, bodies) as asked:
        wide.wait_until_decoding(4, whole=1)
        kill(*wide.find(victim))
        killed_s = time.monotonic()
        *streaming, answering = asked
        streams = [each.result() for each in streaming]
        ended_s = time.monotonic() - killed_s
        whole = answering.result()
    # The connection ends with its process; 0.03 s on a quiet machine.
    assert ended_s < (2.0 if victim == "decode" else 10.0)
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
    """Failure 4b: 504 once both deadlines and the time of the tokens have passed."""
    frozen = wide.find("decode", "decode/engine", "decode/worker")
    with stopped(*frozen):
        url = f"{wide.base_url}/v1/completions"
        reply = send(url, body_of(1200, max_tokens=2, stream=False))
    assert refused(reply, 504, "answer-timeout")
    assert reply.seconds >= 2 * DEADLINE_S


@pytest.mark.parametrize("victim", ["controller", "ingress"])
def test_the_managers_die(wide: Split, victim: str) -> None:
    """
    Failure 13: Ray Serve's controller, or our endpoint, is killed.

    New requests are answered again without anybody's doing; the engines are not touched.
    """
    engines = {each.pid for each in wide.find("prefill/engine", "decode/engine")}
    kill(*wide.find(victim))
    url = f"{wide.base_url}/v1/completions"
    until(lambda: send(url, body_of(1100), timeout_s=10).done, "an answer")
    wide.wait_until_whole()
    assert {each.pid for each in wide.find("prefill/engine", "decode/engine")} == engines
