"""Failures 4 and 13: the decode replica or the controller dies midway."""

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
    """Start and end with all replicas; what was held is released."""
    wide.wait_until_whole()
    yield
    wide.wait_until_whole()
    wide.wait_until_released()


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
