"""Failures 1, 3 and 5 with one replica of each role: it hangs, dies, or KV caches do not arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.serving.client import send
from tests.serving.deployed import Split
from tests.waiting import until

from .load import body_of, refused, under_way
from .processes import kill, stopped
from .reference import Reference

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True, scope="module")
def released(split: Split) -> Iterator[None]:
    """At the end no KV cache is held, also none of a transfer that failed: that takes a lease."""
    yield
    split.wait_until_released()


@pytest.fixture(autouse=True)
def transfers(split: Split) -> Iterator[None]:
    """End with normal transfers."""
    split.wait_until_whole()
    yield
    split("spoil", "nothing")


def test_a_transfer_that_fails_is_computed_again(split: Split, reference: Reference) -> None:
    """Failure 5b: decode computes the prompt itself, the answer is the same, and it says so."""
    split("spoil", "lose")
    assert reference.differences(split.base_url, "lost", lengths={33, 200, 768}) == {}
    for stream in (True, False):
        reply = send(f"{split.base_url}/v1/completions", body_of(410 + stream, stream=stream))
        assert (reply.done, reply.path) == (True, "fallback-local; reason=kv-pull-failed")


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_a_transfer_that_does_not_end(split: Split, *, stream: bool) -> None:
    """
    Failure 5: no KV cache arrives: 504 at the KV-wait deadline, streamed or not.

    The engine answers others from its own cache meanwhile; then all that was held is free again.
    """
    split("spoil", "stall")
    bodies = [body_of(400 + seed, stream=stream) for seed in range(3)]
    with under_way(split.base_url, bodies) as asked:
        local = send(f"{split.base_url}/v1/completions", {**body_of(404), "n": 2, "temperature": 1})
        replies = [each.result() for each in asked]
    assert (local.done, local.path) == (True, "local; reason=n")
    assert all(refused(reply, 504, "kv-wait-timeout") for reply in replies)
    assert min(reply.seconds for reply in replies) >= split.deadline_s
    assert max(reply.seconds for reply in replies) < 2 * split.deadline_s


def test_a_killed_engine_comes_back(split: Split, reference: Reference) -> None:
    """
    Failures 1 and 3: the only prefill engine is killed with prompts inside, which get a 503.

    Decode lives on; Ray Serve starts the replica again, whose KV caches decode fetches, as right
    as before.
    """
    decode = {each.pid for each in split.find("decode", "decode/engine")}
    [replica] = split.find("prefill")
    [victim] = split.find("prefill/engine")
    with ExitStack() as requests:
        with stopped(victim, *split.find("prefill/worker")):
            bodies = [body_of(300 + seed) for seed in range(4)]
            asked = requests.enter_context(under_way(split.base_url, bodies))
            split.wait_until_inside(4)
            kill(victim)
        replies = [each.result() for each in asked]
    codes = ("prefill-failed", "no-prefill-replica")
    assert all(refused(reply, 503, *codes) for reply in replies)
    # Until its health check fails, Ray Serve counts the replica as running.
    until(lambda: replica not in split.find("prefill"), "the replica of the killed engine ends")
    split.wait_until_whole()
    assert {each.pid for each in split.find("decode", "decode/engine")} == decode
    assert reference.differences(split.base_url, "after the kill", lengths={31, 32, 33}) == {}
    last = send(f"{split.base_url}/v1/completions", body_of(310))
    assert (last.done, last.path) == (True, "remote")
