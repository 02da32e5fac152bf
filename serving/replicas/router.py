"""Which prefill replica takes a prompt: the plan's policy, by the function the simulator uses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter

from minicluster.routing import chooser, counts_tokens
from serving.replicas.outstanding import Outstanding
from serving.request.prompt_length import prompt_tokens

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

ASKED = "asked"
"""Argument of a call that is tried again: the list of replicas that had it, kept by the router."""


class PlannedRouter(RequestRouter):  # type: ignore[misc]
    """
    Ray Serve's router with the policy of the plan.

    Topology comes first by construction: a domain is a deployment of its own, and decode asks its
    own domain before the others (`serving.protocol.endpoint_config`, `pairing`).
    Inside a domain, loads are what this
    router has outstanding, requests or prompt tokens, and what the replicas say of others.

    Not `FIFOMixin`: it gives a replica to whoever waits longest, not to whom it was chosen for.
    """

    def initialize_state(self, *, policy: str = "power-of-two") -> None:
        """Take the policy; the arguments come from `serving.deployment.compile`, through Ray."""
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
        """Return the replicas one by one: the policy's choice, then the others by their load."""
        if not candidate_replicas:
            return []
        if pending_request is not None:
            self._unchoose(pending_request)
            candidate_replicas = _not_asked(candidate_replicas, pending_request)
        loads = [self._load(replica.replica_id) for replica in candidate_replicas]
        best = self._choose(loads, self._random, self._turn)
        self._turn += 1
        if pending_request is not None:
            # Where all are full, Ray Serve waits before it asks again only if told to.
            pending_request.routing_context.should_backoff = True
            # Noted now: a burst is routed before its first request is on its way.
            self._note(pending_request, candidate_replicas[best].replica_id)
        ranked = sorted(range(len(loads)), key=lambda at: (at != best, loads[at]))
        return [[candidate_replicas[at]] for at in ranked]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Note where a request really goes: the first choice may have been full or gone."""
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._unchoose(pending_request)
            raise
        if self._chosen.get(pending_request.metadata.internal_request_id) != replica.replica_id:
            self._unchoose(pending_request)
            self._note(pending_request, replica.replica_id)
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
        if ASKED in pending_request.kwargs:
            pending_request.kwargs[ASKED].append(replica.replica_id)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take a request off its replica, however it ended."""
        self._outstanding.remove(replica_id, internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget what was sent to replicas that are gone."""
        super().update_replicas(replicas)
        self._outstanding.forget({replica.replica_id for replica in replicas})

    def _load(self, replica: ReplicaID) -> float:
        """Return a replica's load in the policy's unit."""
        everybody = self.replica_queue_len_cache.get(replica)
        if self._by_tokens:
            return self._outstanding.tokens(replica, everybody)
        return float(self._outstanding.requests(replica, everybody))

    def _note(self, pending: PendingRequest, replica: ReplicaID) -> None:
        """Count a request at a replica."""
        request = pending.metadata.internal_request_id
        self._chosen[request] = replica
        self._outstanding.add(replica, request, _tokens(pending))

    def _unchoose(self, pending: PendingRequest) -> None:
        """Take back a choice that has not been sent."""
        request = pending.metadata.internal_request_id
        replica = self._chosen.pop(request, None)
        if replica is not None:
            self._outstanding.remove(replica, request)


def _not_asked(candidates: list[RunningReplica], pending: PendingRequest) -> list[RunningReplica]:
    """Leave out the replicas that had this call already, unless there are no others."""
    asked = pending.kwargs.get(ASKED, ())
    return [each for each in candidates if each.replica_id not in asked] or candidates


def _tokens(pending: PendingRequest) -> float:
    """Guess the prompt tokens of a call: of its first argument that has a prompt or messages."""
    for argument in (*pending.args, *pending.kwargs.values()):
        fields = argument if isinstance(argument, dict) else getattr(argument, "__dict__", {})
        prompt = fields.get("prompt") or fields.get("messages")
        if prompt:
            return prompt_tokens(prompt)
    return 1.0
