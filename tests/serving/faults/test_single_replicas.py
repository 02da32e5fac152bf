"""Failures 1, 3 and 5 with one replica of each role: it hangs, dies, or KV caches do not arrive."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.serving.client import ask, difference, send

from .load import body_of, under_way
from .processes import kill
from .processes import send as signalled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving.deployed import Split

    from .reference import Reference

pytestmark = pytest.mark.engine

MAX_TOKENS = 24


@pytest.fixture(autouse=True)
def transfers(split: Split) -> Iterator[None]:
    """End with normal transfers, and without held KV cache."""
    split.wait_until_whole()
    yield
    split("spoil", "nothing")
    split.wait_until_released()


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_a_transfer_that_does_not_end(split: Split, *, stream: bool) -> None:
    """
    Failure 5: the KV cache does not arrive.

    Expected: 504 at the KV-wait deadline, streamed or not, while the engine answers others from
    its own cache; once it arrives, all that was held is free again.
    """
    split("spoil", "stall")
    bodies = [body_of(400 + seed, stream=stream) for seed in range(3)]
    with under_way(split.base_url, bodies) as asked:
        local = send(f"{split.base_url}/v1/completions", {**body_of(404), "n": 2, "temperature": 1})
        replies = [each.result() for each in asked]
    assert (local.done, local.path) == (True, "local; reason=n")
    for reply in replies:
        assert (reply.status, reply.body["error"]["code"]) == (504, "kv-wait-timeout")
        assert split.deadline_s <= reply.seconds < 2 * split.deadline_s
        assert int(reply.headers["retry-after"]) >= 1


def test_a_transfer_that_fails_is_computed_again(split: Split, reference: Reference) -> None:
    """
    Failure 5b: the transfer fails.

    Expected: decode computes the prompt itself, and the answer is the same.
    """
    split("spoil", "lose")
    pairs = zip(reference.prompts, reference.answers, strict=True)
    for prompt, right in [(p, r) for p, r in pairs if len(p) in {33, 200, 768}]:
        answer = ask(split.base_url, prompt, 24, "lost")
        assert difference(right, answer, tolerance=1e-3) is None


def test_a_prompt_that_nothing_computes(split: Split) -> None:
    """
    The only prefill replica stops moving.

    Expected: 504 with Retry-After at the prefill deadline, not at the next one; once the replica
    moves again, nothing is left of the request, and others are answered by way of prefill.
    """
    engines = split.find("prefill/engine", "prefill/worker")
    assert engines
    signalled(signal.SIGSTOP, *engines)
    try:
        reply = send(f"{split.base_url}/v1/completions", body_of(200))
    finally:
        signalled(signal.SIGCONT, *engines)
    assert (reply.status, reply.body["error"]["code"]) == (504, "prefill-timeout")
    assert int(reply.headers["retry-after"]) >= 1
    assert split.deadline_s <= reply.seconds < 2 * split.deadline_s
    split.wait_until_released()
    again = send(f"{split.base_url}/v1/completions", body_of(201))
    assert (again.done, again.path) == (True, "remote")


def test_a_killed_engine_comes_back(split: Split, reference: Reference) -> None:
    """
    The EngineCore of the only prefill replica is killed with prompts inside.

    Expected: each of them gets a 503 with Retry-After, and nothing hangs; decode lives on; Ray
    Serve starts the replica again, whose KV caches decode then fetches, as right as before.
    """
    decode = {each.pid for each in split.find("decode", "decode/engine")}
    [victim] = split.find("prefill/engine")
    workers = split.find("prefill/worker")
    signalled(signal.SIGSTOP, victim, *workers)
    with under_way(split.base_url, [body_of(300 + seed) for seed in range(4)]) as asked:
        split.wait_until_inside(4)
        kill(victim)
        signalled(signal.SIGCONT, *workers)
        replies = [each.result() for each in asked]
    for reply in replies:
        assert reply.status == 503, reply
        assert reply.body["error"]["code"] in {"prefill-failed", "no-prefill-replica"}
        assert int(reply.headers["retry-after"]) >= 1
    split.wait_until_whole()
    assert victim.pid not in {each.pid for each in split.find("prefill/engine")}
    assert {each.pid for each in split.find("decode", "decode/engine")} == decode
    for prompt, right in list(zip(reference.prompts, reference.answers, strict=True))[3:6]:
        answer = ask(split.base_url, prompt, MAX_TOKENS, "after the kill")
        assert difference(right, answer, tolerance=1e-3) is None, len(prompt)
    last = send(f"{split.base_url}/v1/completions", body_of(310))
    assert (last.done, last.path) == (True, "remote")
