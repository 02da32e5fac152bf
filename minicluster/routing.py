"""Which replica takes a request: one function for the simulator and for the deployed router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Choose = Callable[[Sequence[float], "Rng", int], int]
    """Loads, source of randomness, number of the request → index of the replica."""


AUTO, LEAST_TOKENS, POWER_OF_TWO = "auto", "least-tokens", "power-of-two"


class Rng(Protocol):
    """What a policy needs of a random generator; `random.Random` and numpy's both have it."""

    def random(self) -> float:
        """Return a number from [0, 1)."""


def round_robin(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Deal requests out in turn, whatever the loads."""
    return turn % len(loads)


def uniform(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Pick any replica."""
    return int(rng.random() * len(loads))


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


def least(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
    """Take the least loaded of all, the first on a tie; loads are tokens for `least-tokens`."""
    return loads.index(min(loads))


POLICIES: dict[str, Choose] = {
    POWER_OF_TWO: power_of_two,
    "round-robin": round_robin,
    LEAST_TOKENS: least,
    "random": uniform,
}
"""By name, as a plan's `routing.policy` has it."""


def chooser(policy: str) -> Choose:
    """
    Return the function of a policy.

    A load is what is outstanding at a replica: prompt tokens for `least-tokens`, requests for
    the others (`counts_tokens`).

    Raises:
        InputError: no policy of that name.
    """
    if policy not in POLICIES:
        raise InputError("routing.policy", policy, "one of " + ", ".join(POLICIES))
    return POLICIES[policy]


def counts_tokens(policy: str) -> bool:
    """Say whether a policy's loads are prompt tokens instead of requests."""
    return policy == LEAST_TOKENS
