"""Choice of replicas."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from minicluster.errors import InputError
from minicluster.routing import POLICIES, Balancer, chooser, counts_tokens, loads_in_groups


def shares(policy: str, loads: list[float], *, rng: object) -> list[float]:
    choose = chooser(policy)
    seen = Counter(choose(loads, rng, turn) for turn in range(30_000))  # type: ignore[arg-type]
    return [seen[at] / 30_000 for at in range(len(loads))]


@pytest.mark.parametrize(
    "rng",
    [random.Random(0), np.random.default_rng(0)],  # noqa: S311
    ids=["standard", "numpy"],
)
def test_policies_choose_as_they_say(rng: object) -> None:
    """Of loads 5, 0 and 2: in turn, evenly, the least, the less loaded of two."""
    loads = [5.0, 0.0, 2.0]
    third = pytest.approx([1 / 3] * 3, abs=0.02)
    assert shares("round-robin", loads, rng=rng) == third
    assert shares("random", loads, rng=rng) == third
    assert shares("least-tokens", loads, rng=rng) == [0, 1, 0]
    assert shares("power-of-two", loads, rng=rng) == pytest.approx([0, 2 / 3, 1 / 3], abs=0.02)


@pytest.mark.parametrize(("draws", "taken"), [((0.9, 0.0), 2), ((0.0, 0.9), 0), ((0.5, 0.9), 1)])
def test_of_two_alike_the_first_drawn_takes_the_request(
    draws: tuple[float, float], taken: int
) -> None:
    """Power of two choices breaks a tie by the order of its draws, here and in every router."""
    scripted = SimpleNamespace(random=iter(draws).__next__)
    assert chooser("power-of-two")([4.0, 4.0, 4.0], scripted, 0) == taken


def test_one_replica_takes_all() -> None:
    for policy in POLICIES:
        assert chooser(policy)([3.0], random.Random(0), 17) == 0  # noqa: S311


def test_names_are_those_of_a_plan() -> None:
    """An unknown name is refused; tokens are the loads of one policy."""
    with pytest.raises(InputError, match="one of power-of-two"):
        chooser("fastest")
    assert [policy for policy in POLICIES if counts_tokens(policy)] == ["least-tokens"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_pool_of_groups_is_balanced_as_a_router_does(policy: str, group: int) -> None:
    """Requests come and go: each choice is the policy's on the loads of ranks and groups then."""
    draw, rng, again = (random.Random(seed) for seed in (3, 1, 1))  # noqa: S311
    balancer = Balancer(policy, 8, rng, group=group)
    sent: list[tuple[int, int]] = []
    for turn in range(300):
        own = [0] * 8
        for at, tokens in sent:
            own[at] += tokens if counts_tokens(policy) else 1
        loads = loads_in_groups(own, [at // group for at in range(8)])
        tokens = draw.choice([1, 1, 100, 2000])
        at = balancer.choose(tokens)
        assert at == chooser(policy)(loads, again, turn)
        sent.append((at, tokens))
        while len(sent) > draw.randint(0, 20):
            balancer.remove(*sent.pop(draw.randrange(len(sent))))


def test_a_rank_of_an_idle_group_is_less_loaded_than_its_equal() -> None:
    """The rank's own load comes first, however much its group has."""
    loads = loads_in_groups([0, 10**6, 1, 0], "aabc")
    assert sorted(range(4), key=loads.__getitem__) == [3, 0, 2, 1]
