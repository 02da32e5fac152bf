"""
Routing policies: which replica takes a request.

This registry is the only list of policies. Scenarios (`search.routing`), plans
(`routing.policy`), the simulator and the deployed router all read it, so that a new policy is one
function below with `@routing_policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    Choose = Callable[[Sequence[float], "Rng", int], int]
    """Loads, source of randomness, number of the request → index of the replica."""


LEAST_TOKENS, POWER_OF_TWO = "least-tokens", "power-of-two"
ROUND_ROBIN = "round-robin"

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
    """

    choose: Choose
    counts_tokens: bool = False


POLICIES: dict[str, RoutingPolicy] = {}
"""Every policy by its name in scenarios and plans."""


def routing_policy(name: str, *, counts_tokens: bool = False) -> Callable[[Choose], Choose]:
    """Register the decorated function as the policy *name*; see `RoutingPolicy`."""

    def register(choose: Choose) -> Choose:
        POLICIES[name] = RoutingPolicy(choose=choose, counts_tokens=counts_tokens)
        return choose

    return register


@routing_policy(POWER_OF_TWO)
def power_of_two(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
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
def round_robin(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Take the replicas in turn, whatever their loads."""
    return turn % len(loads)


@routing_policy(LEAST_TOKENS, counts_tokens=True)
def least_tokens(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Take the replica with the fewest prompt tokens outstanding, the first on a tie."""
    return loads.index(min(loads))


@routing_policy("random")
def uniform(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Take any replica with equal chance, whatever their loads."""
    return int(rng.random() * len(loads))


def find_policy(name: str) -> RoutingPolicy:
    """
    Return the policy called *name*.

    Raises:
        InputError: no policy has that name.
    """
    if name not in POLICIES:
        raise InputError("routing.policy", name, "one of " + ", ".join(POLICIES))
    return POLICIES[name]


def chooser(policy: str) -> Choose:
    """Return the function of the policy called *policy*; see `find_policy`."""
    return find_policy(policy).choose


def counts_tokens(policy: str) -> bool:
    """Say whether a load under *policy* is prompt tokens instead of requests."""
    return find_policy(policy).counts_tokens


def loads_in_groups(own: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """
    Return the loads that a policy compares: of equal ones, that of the less loaded group is less.

    The ranks of a data-parallel group step together, so prompts in one group delay one another
    while another group is idle.

    Args:
        own: what each replica has outstanding.
        groups: the group of each replica.
    """
    total: dict[Hashable, float] = {}
    for group, load in zip(groups, own, strict=True):
        total[group] = total.get(group, 0) + load
    return [OWN * load + total[group] for group, load in zip(groups, own, strict=True)]


class Balancer:
    """
    Chooses among the replicas of a pool by one policy, and keeps their loads in its unit.

    Groups are compared as `loads_in_groups` does.
    """

    __slots__ = ("_by_tokens", "_choose", "_group", "_loads", "_rng", "_turn")

    def __init__(self, policy: str, replicas: int, rng: Rng, *, group: int = 1) -> None:
        """
        Begin without load.

        Args:
            policy: its name.
            replicas: their number.
            rng: what the policy draws from.
            group: consecutive replicas that step together.

        Raises:
            InputError: no policy has that name.
        """
        self._choose = chooser(policy)
        self._by_tokens = counts_tokens(policy)
        self._loads = [0] * replicas
        self._group = group
        self._rng = rng
        self._turn = 0

    def choose(self, tokens: int) -> int:
        """Return the replica for a request with so many prompt tokens, and add its load there."""
        at = self._choose(self._loads, self._rng, self._turn)
        self._turn += 1
        self.add(at, tokens)
        return at

    def add(self, replica: int, tokens: int) -> None:
        """Add the load of a request that is at a replica already."""
        self._change(replica, tokens if self._by_tokens else 1)

    def remove(self, replica: int, tokens: int) -> None:
        """Remove the load of a request that has left its replica."""
        self._change(replica, -tokens if self._by_tokens else -1)

    def _change(self, replica: int, load: int) -> None:
        if self._group > 1:
            first = replica - replica % self._group
            for rank in range(first, first + self._group):
                self._loads[rank] += load
            load *= OWN
        self._loads[replica] += load
