"""The router of every pool: a policy of the plan, by the function that the simulator uses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from ray.serve.request_router import RequestRouter

from minicluster.routing import PrefixIndex, find_policy, loads_in_groups
from serving.request.length import BLOCK_TOKENS, prompt_blocks, prompt_tokens

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

ONLY = "only"
"""Keyword argument of a call that one replica alone can answer: its name."""

TRIED = "tried"
"""Keyword argument of a call that may be retried: the replicas tried, filled by the router."""

GROUP = "group"
"""Key of a replica's routing statistics: the data-parallel group that it is a rank of."""


class RoutedPrompt(NamedTuple):
    """
    The prompt of a call, as a policy needs it.

    Attributes:
        tokens: their estimated number, 1 for a call without a prompt.
        blocks: ids of its blocks (`PrefixIndex`); empty where the policy does not go by them.
    """

    tokens: float
    blocks: tuple[int, ...]


class PlannedRouter(RequestRouter):  # type: ignore[misc]
    """
    Ray Serve's router with the policy of the plan.

    It runs in the endpoint, which alone sends requests, so that it knows every outstanding request
    and prompt token. Topology comes first by construction: a domain is a deployment of its own, and
    the endpoint calls the domain that answers before the others (`EndpointConfig.pairing`).

    Without `FIFOMixin`, which gives a replica to the request that waits longest instead of the one
    that it was chosen for.
    """

    def initialize_state(self, *, policy: str = "power-of-two", cached_tokens: int = 0) -> None:
        """
        Take what `serving.deployment.compile` passes through Ray.

        Args:
            policy: its name.
            cached_tokens: prompt tokens that a replica's prefix cache has room for.
        """
        self._policy = find_policy(policy)
        self._index = PrefixIndex(cached_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
        self._tokens: dict[ReplicaID, dict[str, float]] = {}
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
        prompt = self._prompt(pending_request)
        loads = self._loads(candidate_replicas, prompt)
        best = self._policy.choose(loads, self._random, self._turn)
        self._turn += 1
        if pending_request is not None:
            # Where all are full, Ray Serve waits before the next attempt only with this flag.
            pending_request.routing_context.should_backoff = True
            # Counted now: a burst is routed before its first request is sent.
            self._count(pending_request, candidate_replicas[best].replica_id, prompt)
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
            self._count(pending_request, replica.replica_id, self._prompt(pending_request))
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
        if TRIED in pending_request.kwargs:
            pending_request.kwargs[TRIED].append(replica.replica_id)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove a request from its replica, however it ended."""
        self._remove(replica_id, internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Remove the requests of replicas that are gone."""
        super().update_replicas(replicas)
        for gone in self._tokens.keys() - {replica.replica_id for replica in replicas}:
            del self._tokens[gone]
            self._index.forget(gone)

    def _prompt(self, pending: PendingRequest | None) -> RoutedPrompt:
        """Return the prompt of a call by the body among its arguments."""
        arguments = () if pending is None else pending.args
        bodies = (argument for argument in arguments if isinstance(argument, dict))
        found = ((body, body.get("prompt") or body.get("messages")) for body in bodies)
        for body, prompt in found:
            if prompt:
                by_prefix = self._policy.by_prefix
                # vLLM's prefix cache keeps those of salts and of adapters apart.
                apart = body.get("model"), body.get("cache_salt")
                blocks = prompt_blocks(prompt, apart) if by_prefix else ()
                return RoutedPrompt(prompt_tokens(prompt), blocks)
        return RoutedPrompt(1.0, ())

    def _loads(self, replicas: list[RunningReplica], prompt: RoutedPrompt) -> list[float]:
        own = [self._load(replica.replica_id) for replica in replicas]
        if self._policy.by_prefix:
            names = [replica.replica_id for replica in replicas]
            more = [self._index.uncached_tokens(name, *prompt) for name in names]
            own = [load + tokens for load, tokens in zip(own, more, strict=True)]
        # A replica that has not been asked yet, or has no group, is one by itself.
        groups = [each.routing_stats.get(GROUP, each.replica_id) for each in replicas]
        return loads_in_groups(own, groups)

    def _load(self, replica: ReplicaID) -> float:
        outstanding = self._tokens.get(replica, {})
        counts_tokens = self._policy.counts_tokens
        return sum(outstanding.values()) if counts_tokens else float(len(outstanding))

    def _count(self, pending: PendingRequest, replica: ReplicaID, prompt: RoutedPrompt) -> None:
        request = pending.metadata.internal_request_id
        self._chosen[request] = replica
        tokens = self._index.uncached_tokens(replica, *prompt)
        self._tokens.setdefault(replica, {})[request] = tokens
        self._index.note(replica, prompt.blocks)

    def _unchoose(self, pending: PendingRequest) -> None:
        """Undo a choice that has not been sent."""
        request = pending.metadata.internal_request_id
        replica = self._chosen.pop(request, None)
        if replica is not None:
            self._remove(replica, request)

    def _remove(self, replica: ReplicaID, request: str) -> None:
        self._tokens.get(replica, {}).pop(request, None)


def _untried(candidates: list[RunningReplica], pending: PendingRequest) -> list[RunningReplica]:
    """Exclude the replicas that this call has tried, unless there are no others."""
    tried = pending.kwargs.get(TRIED, ())
    return [each for each in candidates if each.replica_id not in tried] or candidates


def _is_only(replica: RunningReplica, pending: PendingRequest) -> bool:
    return bool(replica.replica_id.unique_id == pending.kwargs[ONLY])
