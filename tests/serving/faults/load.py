"""Requests sent while something fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

from tests.serving.client import Reply, send

from .bodies import words

DEADLINE_S = 8.0
"""Of prefill, and of the hand-off, with several replicas: prompts are short then."""


def body_of(
    seed: int, *, tokens: int = 100, max_tokens: int = 16, stream: bool = True
) -> dict[str, Any]:
    """Return a completion that no cache knows."""
    return {
        "prompt": words(tokens, 10_000 + seed),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }


def refused(reply: Reply, status: int, *codes: str) -> bool:
    """Tell whether a request was refused with one of these codes, and told when to try again."""
    found = (reply.status, reply.body.get("error", {}).get("code"))
    assert found in [(status, code) for code in codes], (found, reply)
    return int(reply.headers["retry-after"]) >= 1


@contextmanager
def under_way(
    url: str, bodies: list[dict[str, Any]], timeout_s: float = 120.0
) -> Iterator[list[Future[Reply]]]:
    """Send all at once; at the end of the block they are answered."""
    with ThreadPoolExecutor(max_workers=max(1, len(bodies))) as clients:
        url = f"{url}/v1/completions"
        yield [clients.submit(send, url, body, timeout_s) for body in bodies]


class Load:
    """Clients that send one request after the other, each waiting for its answer."""

    def __init__(self, url: str, clients: int, **body: Any) -> None:  # noqa: ANN401
        """Prepare *clients* of them; *body* as in `body_of`."""
        self.replies: list[Reply] = []
        self._url = f"{url}/v1/completions"
        self._body = body
        self._stop = threading.Event()
        self._seed = iter(range(1_000_000))
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _ask(self) -> None:
        """Send requests until stopped; after a refusal wait a little, as Retry-After asks for."""
        while not self._stop.is_set():
            reply = send(self._url, body_of(next(self._seed), **self._body), timeout_s=60)
            self.replies.append(reply)
            if not reply.done:
                time.sleep(0.5)
