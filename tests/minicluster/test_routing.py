"""Choice of replicas."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.routing import (
    POLICIES,
    Balancer,
    PrefixIndex,
    find_policy,
    loads_in_groups,
    pool_policy,
)


def shares(policy: str, loads: list[float], *, rng: object) -> list[float]:
    choose = find_policy(policy).choose
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
    assert find_policy("power-of-two").choose([4.0, 4.0, 4.0], scripted, 0) == taken


def test_one_replica_takes_all() -> None:
    for policy in POLICIES:
        assert find_policy(policy).choose([3.0], random.Random(0), 17) == 0  # noqa: S311


def test_names_are_those_of_a_plan() -> None:
    """An unknown name is refused; tokens are the loads of one policy."""
    with pytest.raises(InputError, match="one of power-of-two"):
        find_policy("fastest")
    assert [policy for policy in POLICIES if find_policy(policy).counts_tokens] == [
        "least-tokens",
        "prefix-aware",
    ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_pool_of_groups_is_balanced_as_a_router_does(policy: str, group: int) -> None:
    """Requests come and go: each choice is the policy's on the loads of ranks and groups then."""
    draw, rng, again = (random.Random(seed) for seed in (3, 1, 1))  # noqa: S311
    balancer = Balancer(policy, 8, rng, group=group)
    sent: list[tuple[int, int, int]] = []
    for turn in range(300):
        own = [0] * 8
        for _, at, tokens in sent:
            own[at] += tokens if find_policy(policy).counts_tokens else 1
        loads = loads_in_groups(own, [at // group for at in range(8)])
        tokens = draw.choice([1, 1, 100, 2000])
        at = balancer.choose(turn, tokens)
        assert at == find_policy(policy).choose(loads, again, turn)
        sent.append((turn, at, tokens))
        while len(sent) > draw.randint(0, 20):
            balancer.remove(sent.pop(draw.randrange(len(sent)))[0])


def test_a_rank_of_an_idle_group_is_less_loaded_than_its_equal() -> None:
    """The rank's own load comes first, however much its group has."""
    loads = loads_in_groups([0, 10**6, 1, 0], "aabc")
    assert sorted(range(4), key=loads.__getitem__) == [3, 0, 2, 1]


PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=12)
"""Prompts as ways through a tree of two branches a block."""


def blocks(path: list[int]) -> tuple[int, ...]:
    """Return ids of a prompt's blocks: a node of the tree each."""
    return tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))


@given(PROMPTS, st.lists(st.integers(0, 1), max_size=6))
def test_a_replica_with_room_has_every_prompt_that_went_there(
    sent: list[list[int]], asked: list[int]
) -> None:
    index = PrefixIndex(most_blocks=1000, block_tokens=10)
    for path in sent:
        index.note("a", blocks(path))
    shared = max(
        (
            sum(1 for end in range(len(asked)) if asked[: end + 1] == path[: end + 1])
            for path in sent
        ),
        default=0,
    )
    assert index.uncached_tokens("a", 65, blocks(asked)) == max(1, 65 - 10 * shared)
    assert index.uncached_tokens("b", 65, blocks(asked)) == 65, "another replica has none"
    index.forget("a")
    assert index.uncached_tokens("a", 65, blocks(asked)) == 65


def test_the_prompt_used_longest_ago_is_dropped_first_and_its_last_block_before_the_first() -> None:
    index = PrefixIndex(most_blocks=4, block_tokens=10)
    index.note("a", [1, 2, 3])
    index.note("a", [4])
    index.note("a", [1])
    index.note("a", [5])  # of 2 and 3, the last blocks of the first prompt, one has to go
    found = {block: index.uncached_tokens("a", 10, [block]) == 1 for block in range(1, 6)}
    assert found == {1: True, 2: True, 3: False, 4: True, 5: True}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("waiting_tokens", "taken"), [(2047, 0), (2049, 2)])
def test_a_prompt_goes_where_it_is_cached_unless_more_work_waits_there(
    group: int, waiting_tokens: int, taken: int
) -> None:
    index = PrefixIndex(most_blocks=100, block_tokens=512)
    balancer = Balancer("prefix-aware", 4, random.Random(0), group=group, index=index)  # noqa: S311
    assert balancer.choose(0, 2048, range(4)) == 0
    balancer.add(1, 1, 5000)
    balancer.remove(0)
    assert balancer.choose(2, 2560, range(5)) == 0
    balancer.add(3, 0, waiting_tokens)
    # An idle replica would compute 3,072 tokens, this one 512, after 512 and those that wait.
    assert balancer.choose(4, 3072, range(6)) == taken


def test_the_plan_routes_prompts_and_a_policy_by_prefix_what_stays_too() -> None:
    assert pool_policy("prefill", "least-tokens") == "least-tokens"
    assert pool_policy("mixed", "least-tokens") == "power-of-two"
    assert pool_policy("mixed", "prefix-aware") == "prefix-aware"
    assert pool_policy("decode", "prefix-aware") == "power-of-two"


def test_every_replica_has_a_group() -> None:
    with pytest.raises(ValueError, match="longer"):
        loads_in_groups([1, 2], ["a"])
