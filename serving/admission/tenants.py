"""
Tenants: what each key may use, has used and has taught, and how overload is shared among them.

A tenant is the name of a key. Without keys there is one, and then nothing here decides but the room
that is kept for its long prompts (docs/adr/0110).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.request.length import TokenCounts

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMING, INTERNAL = "timing", "internal"
RIGHTS = frozenset({TIMING, INTERNAL})
"""The rights that a key may have: `Server-Timing` in its answers, and `/internal/` routes."""

MEMORY_S = 30.0
"""Time constant with which used seconds are forgotten: a quiet key may burst for about as long."""

PRESENT_S = 120.0
"""A tenant without a request for so long needs no room."""

REFRESH_S = 0.1
"""Age at which the fair share is computed again; it moves with `MEMORY_S`."""

LIGHT_ADMITTED = 0.995
"""Fraction of the requests of tenants below their fair share for which room is kept."""

OVER_SHARE = 1.05
"""Times the mean of those that ask for more than their share that one of them gets."""

OVER_ROOM = 0.5
"""
Fraction of the room that one leaves that has had more: the others fill it if they want that much.
Were it all of the room, the cluster would idle for what they do not ask for.
"""

LONG = 2.0
"""A prompt is long if its TTFT on an idle cluster is so many times its tenant's mean."""

LONG_ADMITTED = 0.65
"""Admitted fraction of a tenant's long prompts, in terms of that of its others; half is asked."""

GAIN = 0.03
"""Part of the room by which a refusal raises a reserve."""

NEW = 0.005
"""Weight of a new request in a tenant's means: about the last two hundred count."""

DOUBT_S = 60.0
"""
Shortest time between two discounts of what a tenant's texts have taught: a text that is refused for
its estimated length is never counted, and one that is let in by mistake delays everybody.
"""

CONTENDED = 0.05
"""
Refused fraction of the demand from which there are shares: below it everybody loses little, and
room that is left free would have more refused than it saves.
"""

LEAST_ADMITTED = 0.01
"""Lower bound of an admitted fraction that others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """
    The holder of an API key; keys of one name are one tenant.

    Attributes:
        weight: of its fair share under overload.
        requests_per_s, tokens_per_min: mean rates, of prompt and answer tokens together; a second's
            and a minute's worth may come at once. `None`: no limit of its own, here and below.
        max_concurrency: most requests in flight at once.
        rights: of `RIGHTS`.
        share_cache: whether it finds and leaves prefixes in the cache that all such keys share.
    """

    name: str = ""
    weight: float = 1.0
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


@dataclass(slots=True)
class Reserve:
    """
    Room that is kept for one class of requests: a fraction, raised by refusals of that class.

    It settles where the class is admitted as often as wanted, and is 0 where that needs nothing.
    """

    fraction: float = 0.0

    def note(self, *, admitted: bool, wanted_fraction: float) -> None:
        """Take a decision on a request of the class."""
        moved = self.fraction + GAIN * (1 - admitted / wanted_fraction)
        self.fraction = min(1.0, max(0.0, moved))


@dataclass(slots=True)
class LongPrompts:
    """
    The room that a tenant's shorter prompts leave to its long ones, which else starve.

    Attributes:
        longest_s: TTFT of the longest of late on an idle cluster.
        mean_s: mean of all of them.
        short_admitted_fraction: of the others.
    """

    reserve: Reserve = field(default_factory=Reserve)
    longest_s: float = 0.0
    mean_s: float | None = None
    short_admitted_fraction: float = 1.0

    def kept_s(self, idle_ttft_s: float) -> float:
        """Return the seconds that a request of *idle_ttft_s* leaves free."""
        return self.reserve.fraction * max(0.0, self.longest_s - idle_ttft_s)

    def note(self, idle_ttft_s: float, *, admitted: bool) -> None:
        """Take a decision on a request that an idle cluster would serve in time."""
        mean_s = idle_ttft_s if self.mean_s is None else self.mean_s
        self.mean_s = mean_s + NEW * (idle_ttft_s - mean_s)
        if idle_ttft_s > LONG * mean_s:
            self.longest_s = max(idle_ttft_s, (1 - NEW) * self.longest_s)
            wanted = LONG_ADMITTED * max(LEAST_ADMITTED, self.short_admitted_fraction)
            self.reserve.note(admitted=admitted, wanted_fraction=wanted)
        else:
            self.short_admitted_fraction += NEW * (admitted - self.short_admitted_fraction)


@dataclass(slots=True, kw_only=True, eq=False)
class Tenant:
    """
    What the keys of one name have in flight, have used and have taught; it outlives the key file.

    Attributes:
        number: of tenants before it.
        seen_s: when its last request came.
        admitted_s, refused_s: seconds of the cluster that requests took or would have taken, as
            `MEMORY_S` forgets them.
        light: whether it asks for no more than its share.
        over: whether it has had more than others that ask for more than their share.
        discounted_s: when its token counts were last discounted.
    """

    number: int
    ongoing: int = 0
    weight: float = 1.0
    seen_s: float = -math.inf
    admitted_s: float = 0.0
    refused_s: float = 0.0
    light: bool = True
    over: bool = False
    discounted_s: float = -math.inf
    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    long: LongPrompts = field(default_factory=LongPrompts)
    token_counts: dict[str, TokenCounts] = field(
        default_factory=lambda: {kind: TokenCounts() for kind in ("chat", "completions")}
    )

    @property
    def offered_s(self) -> float:
        """Seconds of the cluster that it asked for."""
        return self.admitted_s + self.refused_s

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


class FairShares:
    """
    Max-min fair shares of what the cluster admits, over tenants by their weights.

    A tenant that asks for less than its share is light: it meets the whole room that the SLO
    allows. The others leave it as much as it needs, and while the cluster is busy none of them gets
    more than the others. While little is refused, or one tenant is alone, nobody leaves anything.
    """

    def __init__(self) -> None:
        self._for_light = Reserve()
        self._contended = False
        self._any_light = False
        self._refreshed_s = -math.inf

    def kept_fraction(self, tenant: Tenant) -> float:
        """Return the fraction of its room that a request of *tenant* leaves free."""
        if not self._contended or tenant.light:
            return 0.0
        for_light = self._for_light.fraction if self._any_light else 0.0
        return max(OVER_ROOM, for_light) if tenant.over else for_light

    def note(self, tenant: Tenant, cost_s: float, *, admitted: bool) -> None:
        """Take a decision on a request of *tenant* that would take *cost_s* of the cluster."""
        if self._contended and tenant.light:
            self._for_light.note(admitted=admitted, wanted_fraction=LIGHT_ADMITTED)
        if admitted:
            tenant.admitted_s += cost_s
        else:
            tenant.refused_s += cost_s

    def refresh(self, tenants: Mapping[str, Tenant], now_s: float) -> None:
        """Forget a little of what was used, and compute the shares again, if it is time."""
        passed_s = now_s - self._refreshed_s
        if passed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        kept = math.exp(-passed_s / MEMORY_S)
        for tenant in tenants.values():
            tenant.admitted_s *= kept
            tenant.refused_s *= kept
        present = [each for each in tenants.values() if now_s - each.seen_s < PRESENT_S]
        level_s = _level_s(present)
        self._contended = len(present) > 1 and level_s < math.inf
        for tenant in present:
            tenant.light = tenant.offered_s <= tenant.weight * level_s
        others = [tenant for tenant in present if not tenant.light]
        self._any_light = len(others) < len(present)
        # Not against the level, which sinks where light tenants are refused: one of the others is
        # always within this mean, and fills the cluster.
        admitted_s = sum(tenant.admitted_s for tenant in others)
        weight = sum(tenant.weight for tenant in others)
        for tenant in others:
            tenant.over = tenant.admitted_s * weight > OVER_SHARE * admitted_s * tenant.weight


def _level_s(tenants: list[Tenant]) -> float:
    """Return the share of weight 1: with it the smaller of share and demand add up to the use."""
    left_s = sum(tenant.admitted_s for tenant in tenants)
    if left_s >= (1 - CONTENDED) * sum(tenant.offered_s for tenant in tenants):
        return math.inf
    weight = sum(tenant.weight for tenant in tenants)
    for tenant in sorted(tenants, key=lambda each: each.offered_s / each.weight):
        if tenant.offered_s * weight > left_s * tenant.weight:
            break
        left_s -= tenant.offered_s
        weight -= tenant.weight
    return max(0.0, left_s) / weight
