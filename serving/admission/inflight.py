"""Who is where: the requests that the front door has admitted and that have not ended yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from serving.admission.policy import InflightLoad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.admission.policy import RequestCost
    from serving.protocol.endpoint_config import EndpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeDomain:
    """
    A domain that answers, and the prefill replicas that it uses first.

    Attributes:
        answers: its name.
        role: of the replicas that answer, `decode` or `mixed`.
        prefill: the domain of its prefill replicas; its own in an aggregated plan.
        max_batch_size, max_step_tokens: of one replica that answers: sequences that it decodes at
            once, tokens of prompts that it computes in a step.
    """

    answers: str
    role: str
    prefill: str
    prefill_replicas: int
    decode_replicas: int
    max_batch_size: int
    max_step_tokens: int


def lanes_of(front: EndpointConfig) -> tuple[DecodeDomain, ...]:
    """Return one lane for each domain that answers."""
    pools = {pool.role: pool for pool in front.pools}
    last = pools.get("decode") or pools["mixed"]
    first = pools.get("prefill", last)
    lanes = []
    for domain, replicas in last.replicas.items():
        near = (front.pairing.get(domain) or (domain,))[0]
        lanes.append(
            DecodeDomain(
                answers=domain,
                role=last.role,
                prefill=near,
                prefill_replicas=first.replicas[near],
                decode_replicas=replicas,
                max_batch_size=last.max_batch_size,
                max_step_tokens=last.max_batched_tokens,
            )
        )
    return tuple(lanes)


class InflightRequest:
    """
    One admitted request, from the door to its end.

    Attributes:
        prefill: role and domain of the replicas that compute its prompts.
        work_s: of them, until its first token.
        per_token_s: of those that answer, while they make a token; 0 of prompts computed elsewhere.
        waiting: for its first token.
    """

    __slots__ = ("asked", "lane", "per_token_s", "prefill", "waiting", "work_s")

    def __init__(self, asked: RequestCost, lane: DecodeDomain, work_s: float) -> None:
        """Keep what it counts for."""
        self.asked = asked
        self.waiting = True
        self.lane = lane
        self.prefill = (lane.role, lane.answers) if asked.local else ("prefill", lane.prefill)
        self.work_s = work_s
        # Little: as many join in a step as there are, over the steps that each stays.
        self.per_token_s = work_s / (asked.output_tokens + 1) if asked.local else 0.0


class LiveState:
    """
    The books of the front door.

    They are exact as long as one front door admits everything: `serving.replicas.app` starts one.
    """

    def __init__(self, lanes: tuple[DecodeDomain, ...]) -> None:
        """Start with nobody in."""
        self.lanes = lanes
        pools = [("prefill", lane.prefill) for lane in lanes]
        pools += [(lane.role, lane.answers) for lane in lanes]
        self._work_s = dict.fromkeys(pools, 0.0)
        self._waiting = dict.fromkeys(self._work_s, 0)
        self._sequences = dict.fromkeys((lane.answers for lane in lanes), 0)
        self._context = dict.fromkeys(self._sequences, 0.0)
        self._per_token_s = dict.fromkeys(self._sequences, 0.0)

    def load(self, lane: DecodeDomain) -> InflightLoad:
        """Return what a request would meet in *lane*."""
        return InflightLoad(
            prefill_work_s=self._work_s["prefill", lane.prefill],
            prefill_replicas=lane.prefill_replicas,
            sequences=self._sequences[lane.answers],
            context_tokens=self._context[lane.answers],
            decode_replicas=lane.decode_replicas,
            max_batch_size=lane.max_batch_size,
            max_step_tokens=lane.max_step_tokens,
            local_work_s=self._work_s[lane.role, lane.answers],
            local_per_token_s=self._per_token_s[lane.answers],
        )

    def backlog_s(self) -> dict[str, float]:
        """Seconds of prefill that requests still need, by the domain that computes it."""
        found = dict.fromkeys((domain for _, domain in self._work_s), 0.0)
        for (_, domain), work_s in self._work_s.items():
            found[domain] += work_s
        return found

    def per_replica(self) -> list[float]:
        """Sequences per replica of each lane, in the order of the lanes."""
        return [self._sequences[lane.answers] / lane.decode_replicas for lane in self.lanes]

    def resize(self, live: Mapping[tuple[str, str], int]) -> None:
        """
        Count with the replicas that live, at least one a pool: *live* by (role, domain).

        A pool that is not in *live* keeps its number.
        """
        self.lanes = tuple(
            replace(
                lane,
                prefill_replicas=max(1, live.get(("prefill", lane.prefill), lane.prefill_replicas)),
                decode_replicas=max(1, live.get((lane.role, lane.answers), lane.decode_replicas)),
            )
            for lane in self.lanes
        )

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return sum(self._waiting.values())

    @property
    def sequences(self) -> int:
        """Sequences admitted and not finished."""
        return sum(self._sequences.values())

    def enter(self, asked: RequestCost, lane: DecodeDomain, work_s: float) -> InflightRequest:
        """Count a request in."""
        stay = InflightRequest(asked, lane, work_s)
        self._work_s[stay.prefill] += work_s
        self._waiting[stay.prefill] += 1
        self._per_token_s[lane.answers] += stay.per_token_s
        self._sequences[lane.answers] += asked.sequences
        self._context[lane.answers] += _context(asked)
        return stay

    def begin(self, stay: InflightRequest) -> None:
        """Its first token is there: prefill is done with it. Counts once."""
        if not stay.waiting:
            return
        stay.waiting = False
        at = stay.prefill
        self._waiting[at] -= 1
        # Sums of floats would keep a crumb for ever, and an idle door would not know it is idle.
        self._work_s[at] = self._work_s[at] - stay.work_s if self._waiting[at] else 0.0

    def leave(self, stay: InflightRequest) -> None:
        """Count a request out, however it ended."""
        self.begin(stay)
        at = stay.lane.answers
        self._sequences[at] -= stay.asked.sequences
        anybody = self._sequences[at] > 0
        self._context[at] = self._context[at] - _context(stay.asked) if anybody else 0.0
        self._per_token_s[at] = self._per_token_s[at] - stay.per_token_s if anybody else 0.0


def _context(asked: RequestCost) -> float:
    """Tokens that a request will have cached at its end."""
    return asked.sequences * (asked.prompt_tokens + asked.output_tokens)
