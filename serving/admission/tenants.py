"""Tenants: what each key may use, has used and has taught; without keys there is one tenant."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from serving.request.length import TokenCounts

TIMING, INTERNAL = "timing", "internal"
RIGHTS = frozenset({TIMING, INTERNAL})
"""The rights that a key may have: `Server-Timing` in its answers, and `/internal/` routes."""

DOUBT_S = 60.0
"""
Shortest time between two discounts of what a tenant's texts have taught: a text that is refused for
its estimated length is never counted, and one that is let in by mistake delays everybody.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """
    The holder of an API key; keys of one name are one tenant.

    Attributes:
        requests_per_s, tokens_per_min: mean rates, of prompt and answer tokens together; a second's
            and a minute's worth may come at once. `None`: no limit of its own, here and below.
        max_concurrency: most requests in flight at once.
        rights: of `RIGHTS`.
        share_cache: whether it finds and leaves prefixes in the cache that all such keys share.
    """

    name: str = ""
    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_concurrency: int | None = None
    rights: frozenset[str] = RIGHTS
    share_cache: bool = False


ANONYMOUS = KeyHolder(share_cache=True)
"""The client of every request to an endpoint without keys."""


@dataclass(slots=True)
class TokenBucket:
    """A token bucket; it begins full."""

    level: float = math.inf
    at_s: float = 0.0

    def wait_s(self, cost: float, *, per_s: float, capacity: float, now_s: float) -> float:
        """Return the seconds until there is *cost*, or until the bucket is full if that is less."""
        self.level = min(capacity, self.level + per_s * (now_s - self.at_s))
        self.at_s = now_s
        return max(0.0, (min(cost, capacity) - self.level) / per_s)


@dataclass(slots=True, kw_only=True, eq=False)
class Tenant:
    """
    What the keys of one name have in flight, have used and have taught; it outlives the key file.

    Attributes:
        number: of tenants before it.
        ongoing: its requests in flight.
        discounted_s: when its token counts were last discounted.
    """

    number: int
    ongoing: int = 0
    discounted_s: float = -math.inf
    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    token_counts: dict[str, TokenCounts] = field(
        default_factory=lambda: {kind: TokenCounts() for kind in ("chat", "completions")}
    )

    def limit_wait_s(self, holder: KeyHolder, tokens: float, now_s: float) -> float:
        """Return the seconds until the rates of *holder* allow a request of *tokens*."""
        wait_s = 0.0
        if rate := holder.requests_per_s:
            wait_s = self.requests.wait_s(1, per_s=rate, capacity=max(1.0, rate), now_s=now_s)
        if rate := holder.tokens_per_min:
            token_wait_s = self.tokens.wait_s(tokens, per_s=rate / 60, capacity=rate, now_s=now_s)
            wait_s = max(wait_s, token_wait_s)
        return wait_s

    def charge(self, tokens: float) -> None:
        """Count an admitted request against the rates."""
        self.requests.level -= 1
        self.tokens.level -= tokens

    def discount(self, kind: str, now_s: float) -> None:
        """Doubt what was learned of *kind*, if `DOUBT_S` have passed."""
        if now_s - self.discounted_s >= DOUBT_S:
            self.discounted_s = now_s
            self.token_counts[kind].discount()
