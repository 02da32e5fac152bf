"""The prefill router: the plan's policy, by the function that the simulator uses."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from minicluster.routing import chooser, counts_tokens
from serving.request.length import prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

ONLY = "only"
"""Keyword argument of a call that one replica alone can answer: its name."""

TRIED = "tried"
"""Keyword argument of a call that may be retried: the replicas tried, filled by the router."""


class Outstanding:
    """
    Requests and prompt tokens in progress, by replica.

    Other routers send to the same replicas. Ray Serve reports each replica's total of requests;
    those of other routers count as many tokens as the recent requests of this one.
    """

    def __init__(self) -> None:
        self._tokens: defaultdict[Hashable, dict[Hashable, float]] = defaultdict(dict)
        self._recent: deque[float] = deque(maxlen=64)

    def add(self, replica: Hashable, request: Hashable, tokens: float) -> None:
        """Add a request that is sent to a replica."""
        self._tokens[replica][request] = tokens
        self._recent.append(tokens)

    def remove(self, replica: Hashable, request: Hashable) -> None:
        """Remove a request that has ended, or was not sent."""
        self._tokens[replica].pop(request, None)

    def requests(self, replica: Hashable, total: int | None) -> int:
        """Return a replica's requests; *total* is what the replica itself last reported."""
        return max(len(self._tokens[replica]), total or 0)

    def tokens(self, replica: Hashable, total: int | None) -> float:
        """Return a replica's prompt tokens, as `requests`."""
        ours = self._tokens[replica]
        others = self.requests(replica, total) - len(ours)
        mean = sum(self._recent) / len(self._recent) if self._recent else 1.0
        return sum(ours.values()) + others * mean

    def keep_only(self, live: set[Any]) -> None:
        """Remove the requests of replicas that are gone."""
        for replica in self._tokens.keys() - live:
            del self._tokens[replica]


class PlannedRouter(RequestRouter):  # type: ignore[misc]
    """
    Ray Serve's router with the policy of the plan.

    Topology comes first by construction: a domain is a deployment of its own, and decode calls its
    own domain before the others (`serving.protocol.endpoint_config`, `pairing`). Inside a domain
    the load of a replica is this router's outstanding requests or prompt tokens, and the requests
    of other routers that the replica reports.

    Without `FIFOMixin`, which gives a replica to the request that waits longest instead of the one
    that it was chosen for.
    """

    def initialize_state(self, *, policy: str = "power-of-two") -> None:
        """Take the policy; `serving.deployment.compile` passes it through Ray."""
        self._choose = chooser(policy)
        self._by_tokens = counts_tokens(policy)
        self._outstanding = Outstanding()
        self._chosen: dict[str, ReplicaID] = {}
        self._random = random.Random()  # noqa: S311  (load balancing, not a secret)
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order: the policy's choice, then the others by their load."""
        if pending_request is not None:
            if ONLY in pending_request.kwargs:
                return [[each for each in candidate_replicas if _is_only(each, pending_request)]]
            self._unchoose(pending_request)
            candidate_replicas = _untried(candidate_replicas, pending_request)
        loads = [self._load(replica.replica_id) for replica in candidate_replicas]
        best = self._choose(loads, self._random, self._turn)
        self._turn += 1
        if pending_request is not None:
            # Where all are full, Ray Serve waits before the next attempt only with this flag.
            pending_request.routing_context.should_backoff = True
            # Counted now: a burst is routed before its first request is sent.
            self._count(pending_request, candidate_replicas[best].replica_id)
        ranked = sorted(range(len(loads)), key=lambda at: (at != best, loads[at]))
        return [[candidate_replicas[at]] for at in ranked]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Count the request where it is sent: the first choice may have been full or gone."""
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._unchoose(pending_request)
            raise
        if ONLY in pending_request.kwargs:
            return replica  # its work is done already: it is no load, and takes no turn
        if self._chosen.get(pending_request.metadata.internal_request_id) != replica.replica_id:
            self._unchoose(pending_request)
            self._count(pending_request, replica.replica_id)
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
        if TRIED in pending_request.kwargs:
            pending_request.kwargs[TRIED].append(replica.replica_id)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove a request from its replica, however it ended."""
        self._outstanding.remove(replica_id, internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Remove the requests of replicas that are gone."""
        super().update_replicas(replicas)
        self._outstanding.keep_only({replica.replica_id for replica in replicas})

    def _load(self, replica: ReplicaID) -> float:
        total = self.replica_queue_len_cache.get(replica)
        if self._by_tokens:
            return self._outstanding.tokens(replica, total)
        return float(self._outstanding.requests(replica, total))

    def _count(self, pending: PendingRequest, replica: ReplicaID) -> None:
        request = pending.metadata.internal_request_id
        self._chosen[request] = replica
        self._outstanding.add(replica, request, _tokens(pending))

    def _unchoose(self, pending: PendingRequest) -> None:
        """Undo a choice that has not been sent."""
        request = pending.metadata.internal_request_id
        replica = self._chosen.pop(request, None)
        if replica is not None:
            self._outstanding.remove(replica, request)


def _untried(candidates: list[RunningReplica], pending: PendingRequest) -> list[RunningReplica]:
    """Exclude the replicas that this call has tried, unless there are no others."""
    tried = pending.kwargs.get(TRIED, ())
    return [each for each in candidates if each.replica_id not in tried] or candidates


def _is_only(replica: RunningReplica, pending: PendingRequest) -> bool:
    return bool(replica.replica_id.unique_id == pending.kwargs[ONLY])


def _tokens(pending: PendingRequest) -> float:
    """Estimate the prompt tokens of a call from its first argument with a prompt or messages."""
    for argument in (*pending.args, *pending.kwargs.values()):
        if isinstance(counted := getattr(argument, "prompt_tokens", None), int):
            return float(counted)
        fields = argument if isinstance(argument, dict) else getattr(argument, "__dict__", {})
        prompt = fields.get("prompt") or fields.get("messages")
        if prompt:
            return prompt_tokens(prompt)
    return 1.0
