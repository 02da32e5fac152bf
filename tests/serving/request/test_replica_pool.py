"""Which replica takes a request: the plan's policy on what is outstanding, and who waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.routing import POLICIES, Balancer, PrefixIndex, find_policy
from serving.replicas.seats import NoReplicaError, ReplicaPool, RoutedPrompt, Seat, routed_prompt
from serving.request.cost import BLOCK_TOKENS
from tests.serving.configs import unplanned
from tests.serving.virtual_time import in_virtual_time, run

CACHED_TOKENS = 100_000
ONE = RoutedPrompt()


class Pool:
    """A pool with replicas *names*, in groups if they have some; its policy draws by seed 1."""

    def __init__(
        self,
        policy: str,
        names: str,
        *,
        places: int = 1000,
        groups: Sequence[str | None] | None = None,
    ) -> None:
        config = replace(
            unplanned().prefilling,
            policy=policy,
            cached_tokens=CACHED_TOKENS,
            max_ongoing_requests=places,
            replicas={"d0": len(names)},
        )
        self.pool = ReplicaPool(config, random.Random(1))  # noqa: S311
        self.pool.update(dict(zip(names, groups or [None] * len(names), strict=True)))

    async def seat(self, tokens: float = 1, tried: Collection[str] = ()) -> Seat:
        async with asyncio.timeout(1.0):  # of virtual time: nobody has to wait
            return await self.pool.seat(RoutedPrompt(tokens), tried)

    async def dealt(self, *lengths: float, tried: Collection[str] = ()) -> str:
        """Return where prompts of these lengths go, one after the other."""
        return "".join([(await self.seat(tokens, tried)).replica for tokens in lengths])

    def wait(self, tried: Collection[str] = ()) -> asyncio.Task[Seat]:
        return asyncio.create_task(self.pool.seat(ONE, tried))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_policy_sees_a_burst_as_it_grows(policy: str) -> None:
    """Each choice is the policy's on what was sent before it, in the policy's unit, by one seed."""
    choose = find_policy(policy).choose
    rng, loads = random.Random(1), [0.0, 0.0, 0.0]  # noqa: S311
    lengths = [random.Random(2).randint(1, 900) for _ in range(200)]  # noqa: S311
    expected = ""
    for turn, tokens in enumerate(lengths):
        at = choose(loads, rng, turn)
        loads[at] += tokens if find_policy(policy).counts_tokens else 1
        expected += "abc"[at]
    assert run(Pool(policy, "abc").dealt(*lengths)) == expected


ARRIVALS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 3000), st.integers(0, 3)), min_size=1, max_size=60
)
"""Whether a request comes or one that is there ends; its tokens; what its prompt begins with."""


@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 6), st.sampled_from([1, 2]), ARRIVALS)
def test_it_chooses_as_the_simulator_does(
    policy: str, sets: int, group: int, arrivals: list[tuple[bool, int, int]]
) -> None:
    """With the same arrivals, ends and draws it takes the replicas that `Balancer` takes."""
    index = PrefixIndex(CACHED_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS)
    rng, by_prefix = random.Random(1), find_policy(policy).by_prefix  # noqa: S311
    balancer = Balancer(policy, sets * group, rng, group=group, index=index)
    names = "abcdefghijkl"[: sets * group]

    async def dealt() -> None:
        pool = Pool(policy, names, groups=[str(at // group) for at in range(len(names))]).pool
        taken: list[tuple[int, Seat]] = []
        for number, (comes, tokens, prefix) in enumerate(arrivals):
            if comes or not taken:
                # A prompt of whole blocks, as the policy that goes by them sees one.
                shared = range(prefix * 1000, prefix * 1000 + tokens // BLOCK_TOKENS)
                blocks = (*shared, 10_000 + number) if by_prefix else ()
                size = max(tokens, BLOCK_TOKENS * len(blocks))
                seat = await pool.seat(RoutedPrompt(size, blocks))
                assert seat.replica == names[balancer.choose(number, size, blocks)]
                taken.append((number, seat))
            else:
                request, seat = taken.pop(tokens % len(taken))
                balancer.remove(request)
                pool.leave(seat)

    run(dealt())


@pytest.mark.parametrize(("groups", "taken"), [("1122", "acbda"), (None, "abcda")])
def test_a_prompt_goes_to_the_idle_group(groups: str | None, taken: str) -> None:
    """Ranks that say their group share its load; of equal ranks those of the idle group come."""
    pool = Pool("least-tokens", "abcd", groups=groups)
    assert run(pool.dealt(*[10] * len(taken))) == taken


@in_virtual_time
async def test_a_rank_that_is_full_counts_in_its_group() -> None:
    """Of idle ranks the one whose group has less to do is taken, whichever ranks have it."""
    pool = Pool("least-tokens", "abcd", places=1, groups="1122")
    assert await pool.dealt(900, 100, 1) == "acd"

    pool = Pool("least-tokens", "abcd", groups="1122")
    assert await pool.dealt(900, 100) + await pool.dealt(1, tried=["a", "c"]) == "acd"


@in_virtual_time
async def test_a_request_that_is_tried_again_goes_elsewhere() -> None:
    """Replicas that had it are left out, unless no other is left."""
    pool = Pool("least-tokens", "abc")
    tried: list[str] = []
    for _ in range(4):
        tried.append(await pool.dealt(100, tried=tried))
    assert "".join(tried) == "abca"


@in_virtual_time
async def test_a_full_replica_is_passed_over() -> None:
    """The one with more to do takes the request; nobody waits while any has a place."""
    pool = Pool("least-tokens", "abc", places=2)
    assert await pool.dealt(100, 900, 900, 100, 1, 1) == "abcabc"
    waiting = pool.wait()
    await asyncio.sleep(1.0)
    assert not waiting.done()
    waiting.cancel()


@in_virtual_time
async def test_requests_wait_first_come_first_served() -> None:
    """Each place that gets free has the next one, at once; what waits is no load."""
    pool = Pool("least-tokens", "ab", places=1)
    first, second = await pool.seat(100), await pool.seat(1)
    waiting = [pool.wait() for _ in range(2)]
    await asyncio.sleep(1.0)
    pool.pool.leave(second)
    seats = [await waiting[0]]
    assert not waiting[1].done()
    late = pool.wait()
    pool.pool.leave(first)
    seats.append(await waiting[1])
    assert [seat.replica for seat in seats] == ["b", "a"]
    pool.pool.leave(seats[0])
    assert (await late).replica == "b"


@in_virtual_time
async def test_a_request_that_waits_for_another_replica_holds_up_none_that_does_not() -> None:
    """The one that may not go to the replica that has a place leaves it to those behind it."""
    pool = Pool("least-tokens", "abc", places=1)
    at_a, at_b, _ = [await pool.seat() for _ in range(3)]
    retried, also, behind = pool.wait(tried=["a"]), pool.wait(tried=["a"]), pool.wait()
    await asyncio.sleep(1.0)
    pool.pool.leave(at_a)
    assert (await behind).replica == "a"
    assert not retried.done()
    pool.pool.leave(at_b)
    assert ((await retried).replica, also.done()) == ("b", False)
    pool.pool.leave(await behind)
    assert await pool.dealt(1) == "a"
    pool.pool.leave(await retried)
    assert (await also).replica == "b"


@in_virtual_time
async def test_as_many_wait_as_there_are_places() -> None:
    pool = Pool("round-robin", "ab", places=2)
    await pool.dealt(1, 1, 1, 1)
    waiting = [pool.wait() for _ in range(4)]
    await asyncio.sleep(1.0)
    with pytest.raises(NoReplicaError):
        await pool.pool.seat(ONE)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    waiting.append(pool.wait())
    await asyncio.sleep(1.0)
    assert [each.done() for each in waiting] == [True, *[False] * 4]


@in_virtual_time
async def test_requests_wait_for_replicas_that_are_not_known_yet() -> None:
    """Where there is none any more they are told at once."""
    pool = ReplicaPool(unplanned().prefilling)
    assert pool.live is None
    waiting = [asyncio.create_task(pool.seat(ONE)) for _ in range(2)]
    await asyncio.sleep(5.0)
    pool.update({"a": None})
    assert [(await each).replica for each in waiting] == ["a", "a"]
    pool.update({})
    with pytest.raises(NoReplicaError):
        await pool.seat(ONE)


@in_virtual_time
async def test_who_waits_is_told_that_all_replicas_are_gone() -> None:
    pool = Pool("round-robin", "a", places=1)
    await pool.seat()
    waiting = pool.wait()
    await asyncio.sleep(1.0)
    pool.pool.update({})
    with pytest.raises(NoReplicaError):
        await waiting


@in_virtual_time
@pytest.mark.parametrize("let_in", [False, True])
async def test_a_request_that_is_given_up_leaves_nothing_behind(*, let_in: bool) -> None:
    """While it waits, and in the very moment in which it gets its place."""
    pool = Pool("least-tokens", "a", places=1)
    seat = await pool.seat(100)
    waiting = pool.wait()
    await asyncio.sleep(1.0)
    if let_in:
        pool.pool.leave(seat)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not let_in:
        pool.pool.leave(seat)
    assert await pool.dealt(1) == "a"


@in_virtual_time
async def test_what_was_sent_to_a_replica_that_left_is_forgotten() -> None:
    """One that comes back starts empty, whenever the former requests end; others keep theirs."""
    pool = Pool("least-tokens", "ab", places=2)
    former = [await pool.seat(500), await pool.seat(100)]
    assert [seat.replica for seat in former] == ["a", "b"]
    pool.pool.update({"b": None})
    pool.pool.update({"a": None, "b": None})
    assert await pool.dealt(50) == "a"
    pool.pool.leave(former[0])
    assert await pool.dealt(80, 80) == "ab"  # a has 50 and one place, then b is not yet full
    with pytest.raises(TimeoutError):
        await pool.seat()


@in_virtual_time
async def test_prompts_of_a_replica_that_left_are_forgotten() -> None:
    """It has to compute them again, as another that is idle would."""
    pool, prompt = Pool("prefix-aware", "ab").pool, RoutedPrompt(1000, (1, 2, 3))
    pool.leave(pool.take("a", prompt))
    pool.update({"b": None})
    pool.update({"a": None, "b": None})
    pool.take("a", RoutedPrompt(10))
    assert (await pool.seat(prompt)).replica == "b"


@in_virtual_time
async def test_a_replica_that_has_answered_is_known_by_it() -> None:
    """One whose requests only ended has not, and neither has one that is gone."""
    pool = Pool("least-tokens", "ab").pool
    pool.leave(pool.take("a", ONE), answered=True)
    pool.leave(pool.take("b", ONE))
    assert [pool.answered_within(each, 60.0) for each in "abc"] == [True, False, False]


@in_virtual_time
async def test_a_replica_without_requests_is_idle() -> None:
    """Whatever fractions of tokens there were estimated to be."""
    pool = Pool("least-tokens", "ab").pool
    for seat in [pool.take("a", RoutedPrompt(tokens)) for tokens in (1.1, 3.3, 1.7)]:
        pool.leave(seat)
    assert (await pool.seat(ONE)).replica == "a"


@in_virtual_time
async def test_a_request_that_is_there_already_is_counted_there() -> None:
    """It is load as any other, at a full replica and at one that nobody knows of."""
    pool = Pool("least-tokens", "ab", places=1)
    seats = [pool.pool.take(name, RoutedPrompt(5)) for name in "aaz"]
    assert await pool.dealt(1) == "b"
    for seat in seats:
        pool.pool.leave(seat)
    assert await pool.dealt(1) == "a"


@in_virtual_time
async def test_a_replica_that_is_known_late_has_what_is_there_already() -> None:
    """Whether it comes first or after others; what has ended meanwhile is no load."""
    pool = ReplicaPool(replace(unplanned().prefilling, max_ongoing_requests=2))
    seats = [pool.take(name, ONE) for name in "abbc"]
    pool.update({"a": None})
    pool.leave(seats[3])
    pool.update(dict.fromkeys("abc"))
    taken = [(await pool.seat(ONE)).replica for _ in range(3)]
    assert sorted(taken) == ["a", "c", "c"]
    waiting = asyncio.create_task(pool.seat(ONE))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    pool.leave(seats[1])
    assert (await waiting).replica == "b"


@in_virtual_time
async def test_prompts_that_begin_alike_go_to_one_replica_until_it_has_too_much_to_do() -> None:
    """The policy compares what each replica would have to compute, new tokens included."""
    pool = Pool("prefix-aware", "abc")

    async def sent(token: int, tokens: int) -> Seat:
        prompt = routed_prompt("prefix-aware", {"prompt": [token] * tokens})
        return await pool.pool.seat(prompt)

    seats = [await sent(token, 1024) for token in (1, 2, 3)]
    for seat in seats:
        pool.pool.leave(seat)
    first = "".join(seat.replica for seat in seats)
    later = "".join([(await sent(token, 1100)).replica for token in (3, 2, 1, 3, 3)])
    assert sorted(first) == ["a", "b", "c"]
    assert later == first[::-1] + first[2] * 2
    pool.pool.update(dict.fromkeys(first[:2]))  # the replica that had it is gone
    assert (await sent(3, 1100)).replica in first[:2]


def test_what_a_policy_needs_of_a_prompt() -> None:
    """Its blocks only where it goes by them; they differ by adapter and by the cache's salt."""
    body: dict[str, Any] = {"prompt": [7] * 1000}
    assert routed_prompt("least-tokens", body) == RoutedPrompt(1000, ())
    assert routed_prompt("least-tokens", {}) == RoutedPrompt(1.0, ())
    chats = [{"role": "user", "content": "x" * 4000}]
    assert routed_prompt("least-tokens", {"messages": chats}).tokens > 500
    bodies = [body, {**body, "model": "red"}, {**body, "cache_salt": "s"}]
    blocks = [set(routed_prompt("prefix-aware", each).blocks) for each in bodies]
    assert all(len(each) == 1000 // BLOCK_TOKENS for each in blocks)
    assert len(set().union(*blocks)) == 3 * len(blocks[0])
