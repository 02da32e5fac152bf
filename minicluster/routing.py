"""
Routing policies: which replica takes a request.

This registry is the only list of policies. Scenarios (`search.routing`), plans
(`routing.policy`), the simulator and the deployed router all read it, so that a new policy is one
function below with `@routing_policy`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    Choose = Callable[[list[float], "Rng", int], int]
    """Loads, source of randomness, number of the request → index of the replica."""


LEAST_TOKENS, POWER_OF_TWO = "least-tokens", "power-of-two"
ROUND_ROBIN = "round-robin"
PREFIX_AWARE = "prefix-aware"

ANSWER_POLICY = POWER_OF_TWO
"""How the endpoint chooses among the replicas that answer; prompts go by the plan's policy."""


OWN = 1_000_000_000
"""Weight of a replica's own load beside that of its group, which so decides between equal ones."""


class Rng(Protocol):
    """The part of a random generator that policies use; `random.Random` and numpy's have it."""

    def random(self) -> float:
        """Return a number from [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    """
    How to choose a replica by the loads of all.

    A load is outstanding prompt tokens where the policy *counts_tokens*, else outstanding requests.
    Where the policy is *by_prefix*, tokens that a replica's prefix cache has do not count, and the
    request's own tokens do (`PrefixIndex`).
    """

    choose: Choose
    counts_tokens: bool
    by_prefix: bool


POLICIES: dict[str, RoutingPolicy] = {}  # every policy by its name in scenarios and plans


def routing_policy(
    name: str, *, counts_tokens: bool = False, by_prefix: bool = False
) -> Callable[[Choose], Choose]:
    """Register the decorated function as the policy *name*; see `RoutingPolicy`."""

    def register(choose: Choose) -> Choose:
        POLICIES[name] = RoutingPolicy(
            choose=choose, counts_tokens=counts_tokens, by_prefix=by_prefix
        )
        return choose

    return register


@routing_policy(POWER_OF_TWO)
def power_of_two(loads: list[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """
    Pick two different replicas and take the less loaded one; the first of the two on a tie.

    Source: Mitzenmacher; Ray Serve's default router does this with requests as loads.
    """
    replicas = len(loads)
    if replicas == 1:
        return 0
    first = int(rng.random() * replicas)
    second = int(rng.random() * (replicas - 1))
    if second >= first:
        second += 1
    return second if loads[second] < loads[first] else first


@routing_policy(ROUND_ROBIN)
def round_robin(loads: list[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Take the replicas in turn, whatever their loads."""
    return turn % len(loads)


@routing_policy(LEAST_TOKENS, counts_tokens=True)
def least_tokens(loads: list[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Take the replica with the fewest prompt tokens outstanding, the first on a tie."""
    best, least = 0, loads[0]
    for at, load in enumerate(loads):  # compiled, a loop takes a third of what `min` does
        if load < least:
            best, least = at, load
    return best


@routing_policy(PREFIX_AWARE, counts_tokens=True, by_prefix=True)
def least_uncached_tokens(loads: list[float], rng: Rng, turn: int) -> int:
    """
    Take the replica that would have computed the prompt first, its own cached tokens left out.

    Source: the cost of NVIDIA Dynamo's KV router, with a weight of 1 for the overlap.
    """
    return least_tokens(loads, rng, turn)


@routing_policy("random")
def uniform(loads: list[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Take any replica with equal chance, whatever their loads."""
    return int(rng.random() * len(loads))


def find_policy(name: str) -> RoutingPolicy:
    """Return the policy called *name*. Raises InputError: no policy has that name."""
    if name not in POLICIES:
        raise InputError("routing.policy", name, "one of " + ", ".join(POLICIES))
    return POLICIES[name]


def pool_policy(role: str, policy: str) -> str:
    """
    Return the policy among the replicas of a pool.

    The plan's chooses where prompts are computed before they are passed on, and, if it goes by
    prefixes, where they stay.
    """
    if role == "prefill" or (role == "mixed" and find_policy(policy).by_prefix):
        return policy
    return ANSWER_POLICY


class PrefixIndex:
    """
    The prompt blocks that each replica has in its prefix cache, as a router takes it (eq. Q13).

    A router sees no cache: a replica is taken to keep the blocks of the prompts that were last
    sent there, as many as its memory holds, and to lose the least recently used first.

    Ignores: answers, whose tokens a later turn finds as well; and that running requests hold
    memory which cached blocks then lack.
    """

    __slots__ = ("_block_tokens", "_kept", "_most_blocks")

    def __init__(self, most_blocks: int, block_tokens: int) -> None:
        """Start empty, for so many blocks a replica."""
        self._most_blocks = most_blocks
        self._block_tokens = block_tokens
        self._kept: dict[Hashable, OrderedDict[int, None]] = {}

    def uncached_tokens(self, replica: Hashable, tokens: float, blocks: Sequence[int]) -> float:
        """
        Return the tokens that a replica would have to compute of a prompt, at least 1.

        Equal ids of whole *blocks*, in order, mean equal prompts up to there.
        """
        kept = self._kept.get(replica)
        if kept is None:
            return tokens
        cached = 0
        for block in blocks:
            if block not in kept:
                break
            cached += 1
        return max(1, tokens - cached * self._block_tokens)

    def note(self, replica: Hashable, blocks: Sequence[int]) -> None:
        """Note that a prompt goes to a replica; its first blocks are the last to be dropped."""
        kept = self._kept.setdefault(replica, OrderedDict())
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > self._most_blocks:
            kept.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """Drop what a replica had that is gone."""
        self._kept.pop(replica, None)


def loads_in_groups(
    own: Sequence[float], groups: Sequence[Hashable], more: Sequence[float] | None = None
) -> list[float]:
    """
    Return the loads that a policy compares: of equal ones, that of the less loaded group is less.

    The ranks of a data-parallel group step together, so prompts in one group delay one another
    while another group is idle. *more* is what the request would add at each; `None`: the same.
    """
    members = Counter(groups)
    total: dict[Hashable, float] = {}
    for group, load in zip(groups, own, strict=True):
        if members[group] > 1:  # of a replica that is alone its own load says all
            total[group] = total.get(group, 0.0) + load
    added = own if more is None else [a + b for a, b in zip(own, more, strict=True)]
    return [OWN * load + total.get(group, 0.0) for group, load in zip(groups, added, strict=True)]


class Balancer:
    """
    Chooses among the replicas of a pool by one policy, and keeps their loads in its unit.

    Groups are compared as `loads_in_groups` does.
    """

    __slots__ = ("_by_tokens", "_choose", "_group", "_index", "_loads", "_rng", "_sent", "_turn")

    def __init__(
        self,
        policy: str,
        replicas: int,
        rng: Rng,
        *,
        group: int,
        index: PrefixIndex | None = None,
    ) -> None:
        """Begin without load; *group* consecutive replicas step together."""
        chosen = find_policy(policy)
        self._choose = chosen.choose
        self._by_tokens = chosen.counts_tokens
        self._index = index if chosen.by_prefix else None
        self._loads = [0.0] * replicas
        self._sent: dict[int, tuple[int, float]] = {}
        self._group = group
        self._rng = rng
        self._turn = 0

    def choose(self, request: int, tokens: int, blocks: Sequence[int] = ()) -> int:
        """Return the replica for a request with a prompt of *blocks*, and add its load there."""
        index = self._index
        if index is None or not blocks:
            at = self._choose(self._loads, self._rng, self._turn)
            self.add(request, at, tokens)
        else:
            replicas = range(len(self._loads))
            own = [index.uncached_tokens(replica, tokens, blocks) for replica in replicas]
            weight = OWN if self._group > 1 else 1
            loads = [load + weight * more for load, more in zip(self._loads, own, strict=True)]
            at = self._choose(loads, self._rng, self._turn)
            self.add(request, at, own[at])
            index.note(at, blocks)
        self._turn += 1
        return at

    def add(self, request: int, replica: int, tokens: float) -> None:
        """Add the load of a request that is at a replica already."""
        load = tokens if self._by_tokens else 1
        self._sent[request] = replica, load
        self._change(replica, load)

    def remove(self, request: int) -> None:
        """Remove the load of a request that has left its replica."""
        replica, load = self._sent.pop(request)
        self._change(replica, -load)

    def _change(self, replica: int, load: float) -> None:
        if self._group > 1:
            first = replica - replica % self._group
            for rank in range(first, first + self._group):
                self._loads[rank] += load
            load *= OWN
        self._loads[replica] += load
