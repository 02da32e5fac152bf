"""What a router has sent to each replica and not got back."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Protocol


class Hashable(Protocol):
    """A replica's id, a request's id."""

    def __hash__(self) -> int:
        """Be a key."""


class Outstanding:
    """
    Requests and prompt tokens under way, by replica.

    Other routers send to the same replicas. How many requests a replica has from everybody, Ray
    Serve tells; those that are not ours count as many tokens as ours had of late.
    """

    def __init__(self) -> None:
        """Start with nothing sent."""
        self._sent: dict[tuple[Any, Any], float] = {}
        self._requests: Counter[Any] = Counter()
        self._tokens: dict[Any, float] = {}
        self._late: deque[float] = deque(maxlen=64)

    def add(self, replica: Hashable, request: Hashable, tokens: float) -> None:
        """Note a request on its way to a replica; one that is already there is not noted twice."""
        if (replica, request) in self._sent:
            return
        self._sent[replica, request] = tokens
        self._requests[replica] += 1
        self._tokens[replica] = self._tokens.get(replica, 0.0) + tokens
        self._late.append(tokens)

    def remove(self, replica: Hashable, request: Hashable) -> None:
        """Note that a request has ended, or never went there."""
        tokens = self._sent.pop((replica, request), None)
        if tokens is None:
            return
        self._requests[replica] -= 1
        left = self._tokens[replica] - tokens
        self._tokens[replica] = left if self._requests[replica] else 0.0

    def requests(self, replica: Hashable, everybody: int | None = None) -> int:
        """Count a replica's requests; *everybody* is what the replica itself last said."""
        return max(self._requests[replica], everybody or 0)

    def tokens(self, replica: Hashable, everybody: int | None = None) -> float:
        """Count a replica's prompt tokens, as `requests`."""
        others = self.requests(replica, everybody) - self._requests[replica]
        mean = sum(self._late) / len(self._late) if self._late else 1.0
        return self._tokens.get(replica, 0.0) + others * mean

    def forget(self, alive: set[Any]) -> None:
        """Drop what was sent to replicas that are gone."""
        for replica, request in [key for key in self._sent if key[0] not in alive]:
            self.remove(replica, request)
        for replica in [each for each in self._requests if each not in alive]:
            del self._requests[replica]
            self._tokens.pop(replica, None)
