"""
Failures 6 and 11: clients that leave or dawdle.

Failure 8 is in `test_endpoint.py`, and 10, forged transfers, in `tests/serving/request`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.client import begin, send
from tests.serving.deployed import Split

from .load import body_of
from .processes import stopped

pytestmark = pytest.mark.engine

CLASSES_THAT_LEAVE: list[dict[str, object]] = [
    {},
    {"stream": False},
    {"n": 3, "temperature": 1},
    {"prompt_logprobs": 1, "stream": False},
]
PACE = 2.0
"""More than other work on the machine makes of it, far less than a byte a second does."""


@pytest.fixture(autouse=True)
def harmless(split: Split) -> Iterator[None]:
    """Expect of all of them: no engine dies, other clients are served, no KV cache stays held."""
    split.wait_until_whole()
    before = {each.pid for each in split.find("prefill/engine", "decode/engine")}
    yield
    split.wait_until_released()
    assert {each.pid for each in split.find("prefill/engine", "decode/engine")} == before
    assert send(f"{split.base_url}/v1/completions", body_of(0)).done


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_clients_that_leave_at_each_stage(split: Split, *, stream: bool) -> None:
    """Failure 6: clients leave while they wait for prefill, for the KV cache or for tokens."""
    with stopped(*split.find("prefill/engine", "prefill/worker")):
        _leave(split, 500, stream=stream)
    split.wait_until_inside(0)
    split("spoil", "stall")
    try:
        _leave(split, 510, stream=stream)
    finally:
        split("spoil", "nothing")
    split.wait_until_inside(0)
    _leave(split, 520, stream=stream)


def _leave(split: Split, seed: int, *, stream: bool) -> None:
    """Have six clients ask, and hang up when all of them are inside."""
    bodies = [body_of(seed + n, max_tokens=800, stream=stream) for n in range(6)]
    clients = [begin(split.base_url, body) for body in bodies]
    split.wait_until_inside(6)
    time.sleep(1.5)
    for client in clients:
        client.close()
    time.sleep(0.5)


@pytest.mark.parametrize("count", [24, pytest.param(100, marks=pytest.mark.campaign)])
def test_clients_that_leave_at_any_moment(split: Split, count: int) -> None:
    """Failure 6: clients hang up at random moments of their requests, of every class."""
    rng = random.Random(100)  # noqa: S311

    def leave(seed: int, tokens: int, more: dict[str, object], after_s: float) -> None:
        body = body_of(600 + seed, tokens=tokens, max_tokens=200) | more
        client = begin(split.base_url, body)
        time.sleep(after_s)
        client.close()

    with ThreadPoolExecutor(max_workers=4) as clients:
        left = [
            clients.submit(
                leave,
                seed,
                rng.choice([20, 300, 1200]),
                rng.choice(CLASSES_THAT_LEAVE),
                rng.uniform(0, 0.8),
            )
            for seed in range(count)
        ]
    for each in left:
        each.result()


@pytest.mark.campaign
def test_clients_that_read_slowly(split: Split) -> None:
    """
    Failure 11: while 50 clients read a byte a second memory grows by at most 10 %.

    Others get their tokens as before; a reader that held an engine back would do so for minutes.
    """
    roles = ("ingress", "decode")
    before = _others(split, 900)
    sizes = {each.role: each.resident_bytes for each in split.find(*roles)}
    clients = [begin(split.base_url, body_of(910 + n, max_tokens=60)) for n in range(50)]
    for _ in range(20):
        for client in clients:
            client.recv(1)
        time.sleep(1)
    meanwhile = _others(split, 960)
    grown = {each.role: each.resident_bytes / sizes[each.role] for each in split.find(*roles)}
    for client in clients:
        client.close()
    split.wait_until_released()
    _others(split, 970)
    assert max(grown.values()) <= 1.1, grown
    assert meanwhile < PACE * before


def _others(split: Split, seed: int) -> float:
    """Return how long others wait for their tokens after the first: the median of five."""
    url = f"{split.base_url}/v1/completions"
    replies = [send(url, body_of(seed + n)) for n in range(5)]
    assert all(reply.done for reply in replies)
    return statistics.median(reply.seconds - reply.first_s for reply in replies)
