"""Replica choice: the plan's policy on what is outstanding, by Ray Serve's own machinery."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.routing import POLICIES, Rng, chooser, counts_tokens, find_policy, routing_policy
from serving.request.length import prompt_tokens
from tests.serving.virtual_time import run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.serve._private.common import (
        DeploymentHandleSource,
        DeploymentID,
        ReplicaID,
        RequestMetadata,
    )
    from ray.serve.request_router import PendingRequest

    from serving.replicas.router import Outstanding, PlannedRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EVENTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 9), st.floats(1, 1000)), max_size=60
)


@given(EVENTS)
def test_counts_equal_what_is_outstanding(events: list[tuple[bool, int, int, float]]) -> None:
    """After any adds and removes, repeated or of things unknown, loads are the sums of the rest."""
    outstanding, under_way = Outstanding(), dict[tuple[int, int], float]()
    for adds, replica, request, tokens in events:
        if adds:
            outstanding.add(replica, request, tokens)
            under_way.setdefault((replica, request), tokens)
        else:
            outstanding.remove(replica, request)
            under_way.pop((replica, request), None)
    for replica in range(3):
        mine = [tokens for (at, _), tokens in under_way.items() if at == replica]
        assert outstanding.requests(replica) == len(mine)
        assert outstanding.tokens(replica) == pytest.approx(sum(mine), abs=1e-6)
        if not mine:
            assert outstanding.tokens(replica) == 0


def test_requests_of_others_count_as_ours_do() -> None:
    """A replica that says it has more requests than we sent is loaded by our mean prompt."""
    outstanding = Outstanding()
    outstanding.add("a", 1, 100.0)
    outstanding.add("a", 2, 300.0)
    assert outstanding.requests("a", 5) == 5
    assert outstanding.tokens("a", 5) == 400 + 3 * 200
    assert outstanding.tokens("b", 1) == 200
    assert outstanding.tokens("a", 0) == 400  # what it said is older than what we sent


def test_replicas_that_are_gone_are_forgotten() -> None:
    """Neither requests nor tokens of a dead replica remain."""
    outstanding = Outstanding()
    outstanding.add("a", 1, 100.0)
    outstanding.add("b", 2, 100.0)
    outstanding.keep_only({"b"})
    assert (outstanding.requests("a"), outstanding.tokens("a")) == (0, 0)
    assert (outstanding.requests("b"), outstanding.tokens("b")) == (1, 100)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([5, 6, 7], 3), ("abcdefgh", 2), ([{"role": "user", "content": "x" * 40}], 10), (None, 1)],
)
def test_prompts_are_sized_before_they_are_tokenized(prompt: object, tokens: float) -> None:
    """Ids are counted; text is guessed from its bytes; nothing is an error."""
    assert prompt_tokens(prompt) == tokens


class Replica:
    """A prefill replica as Ray Serve's router sees it: its id, its places, and what is taken."""

    def __init__(self, name: str, *, places: int = 1000) -> None:
        """Take nothing yet."""
        deployment = DeploymentID(name="Prefill:demo")
        self.replica_id = ReplicaID(unique_id=name, deployment_id=deployment)
        self.max_ongoing_requests = places
        self.ongoing = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Return how many requests the replica has, from all routers."""
        assert deadline_s > 0
        return self.ongoing


class Routed:
    """Our router inside Ray Serve's machinery, over replicas of the test; policies draw by seed."""

    def __init__(self, policy: str, *replicas: Replica) -> None:
        """Route to *replicas*."""
        self.router = PlannedRouter(
            DeploymentID(name="Prefill:demo"),
            DeploymentHandleSource.REPLICA,
            get_curr_time_s=time.monotonic,
        )
        self.router.initialize_state(policy=policy)
        self.router._random = random.Random(1)  # noqa: S311
        self.replicas = list(replicas)
        self.router.update_replicas(self.replicas)
        self._sent = 0

    def pending(self, tokens: int = 1, tried: list[ReplicaID] | None = None) -> PendingRequest:
        """Return a call with a prompt, as Ray Serve hands it to its router."""
        self._sent += 1
        name = f"request-{self._sent}"
        return PendingRequest(
            args=[SimpleNamespace(prompt=[1] * tokens)],
            kwargs={} if tried is None else {"tried": tried},
            metadata=RequestMetadata(request_id=name, internal_request_id=name),
        )

    async def route(self, tokens: int = 1, tried: list[ReplicaID] | None = None) -> str:
        """Return where a call with a prompt of so many tokens goes."""
        replica = await self.router._choose_replica_for_request(self.pending(tokens, tried))
        return str(replica.replica_id.unique_id)

    async def order(self) -> str:
        """Return the order in which a call would try the replicas, whose own word is old by now."""
        await asyncio.sleep(3600.0)
        tried = await self.router.choose_replicas(self.replicas)
        return "".join(replica.replica_id.unique_id for [replica] in tried)

    def end(self, name: str, number: int) -> None:
        """Tell the router that its request of this number has ended at a replica."""
        [at] = [each.replica_id for each in self.replicas if each.replica_id.unique_id == name]
        self.router.on_request_completed(at, f"request-{number}")


def _named(*names: str) -> list[Replica]:
    """Return replicas with room."""
    return [Replica(name) for name in names]


def test_round_robin_deals_out_in_turn() -> None:
    """Whatever the prompts, the replicas take turns."""

    async def dealt() -> str:
        routed = Routed("round-robin", *_named("a", "b", "c"))
        return "".join([await routed.route(tokens) for tokens in (900, 1, 1, 1, 900, 5, 7)])

    assert run(dealt()) == "abcabca"


def test_least_tokens_fills_the_emptiest() -> None:
    """Prompts go where the fewest tokens are outstanding, to the first of equals."""

    async def filled() -> str:
        routed = Routed("least-tokens", *_named("a", "b", "c"))
        # outstanding: 500; 500, 300; 500, 300, 100; then c has 200, 300; b 400; c 350, b 450
        return "".join(
            [await routed.route(tokens) for tokens in (500, 300, 100, 100, 100, 100, 50, 60)]
        )

    assert run(filled()) == "abcccbcc"


def test_power_of_two_counts_requests_and_spares_the_fullest() -> None:
    """Of two replicas the one with fewer requests is taken, however long their prompts."""

    async def burst() -> list[str]:
        routed = Routed("power-of-two", *_named("a", "b"))
        return [await routed.route(tokens) for tokens in (900, 1, 900, 1, 900, 1, 900, 1)]

    went = run(burst())
    assert [set(went[at : at + 2]) for at in range(0, 8, 2)] == [{"a", "b"}] * 4


def test_power_of_two_keeps_many_replicas_level() -> None:
    """Of 400 calls at once each of eight replicas gets 47 to 53; choices by chance vary more."""

    async def burst(policy: str) -> list[int]:
        routed = Routed(policy, *_named(*"abcdefgh"))
        went = [await routed.route() for _ in range(400)]
        return sorted(went.count(name) for name in "abcdefgh")

    level = run(burst("power-of-two"))
    assert (level[0] >= 47, level[-1] <= 53) == (True, True)
    uneven = run(burst("random"))
    assert (uneven[0] < 47, uneven[-1] > 53) == (True, True)


def test_a_registered_policy_is_deployable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that `minicluster.routing` registers routes here by its name, without other code."""
    monkeypatch.setitem(POLICIES, "last", find_policy("random"))

    @routing_policy("last")
    def last(loads: Sequence[float], rng: Rng, turn: int) -> int:  # noqa: ARG001
        return len(loads) - 1

    async def dealt() -> str:
        routed = Routed("last", *_named("a", "b", "c"))
        return "".join([await routed.route(tokens) for tokens in (900, 1, 1)])

    assert run(dealt()) == "ccc"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_policy_sees_a_burst_as_it_grows(policy: str) -> None:
    """Each choice is the policy's on what was sent before it, in the policy's unit, by one seed."""
    choose: Callable[..., int] = chooser(policy)
    rng, loads = random.Random(1), [0.0, 0.0, 0.0]  # noqa: S311
    lengths = [random.Random(2).randint(1, 900) for _ in range(200)]  # noqa: S311

    async def burst() -> str:
        routed = Routed(policy, *_named("a", "b", "c"))
        return "".join([await routed.route(tokens) for tokens in lengths])

    expected = ""
    for turn, tokens in enumerate(lengths):
        at = choose(loads, rng, turn)
        loads[at] += tokens if counts_tokens(policy) else 1
        expected += "abc"[at]
    assert run(burst()) == expected


def test_other_replicas_are_tried_by_their_load() -> None:
    """Behind the policy's choice the emptiest comes first, and the fullest last."""

    async def tried() -> tuple[str, str]:
        routed = Routed("least-tokens", *_named("a", "b", "c", "d"))
        for tokens in (300, 100, 200):
            await routed.route(tokens)
        by_tokens = await routed.order()
        turns = Routed("round-robin", *_named("a", "b", "c"))
        for _ in range(4):  # a has two, b and c one; then b's ends, and b is next in turn
            await turns.route()
        turns.end("b", 2)
        await turns.order()
        return by_tokens, await turns.order()

    assert run(tried()) == ("dbca", "cba")


def test_a_full_replica_is_passed_over_and_the_call_counts_where_it_went() -> None:
    """The next by load takes it; the full one is as empty as before for the calls after."""

    async def routed_on() -> tuple[list[str], str]:
        a, b, c = Replica("a", places=1), Replica("b"), Replica("c")
        routed = Routed("least-tokens", a, b, c)
        a.ongoing = 1  # from another router
        return [await routed.route(tokens) for tokens in (100, 100, 500)], await routed.order()

    # a's request counts as one of ours of late: the third call tries a first, then b, then c.
    assert run(routed_on()) == (["b", "c", "b"], "acb")


def test_a_call_that_waits_for_a_place_counts_once() -> None:
    """However often it tries, while all are full, nothing of it is left once it has ended."""

    async def waited() -> tuple[str, set[str]]:
        a, b, c = (Replica(name, places=1) for name in "abc")
        routed = Routed("round-robin", a, b, c)
        a.ongoing = b.ongoing = c.ongoing = 1
        going = asyncio.create_task(routed.route(100))
        await asyncio.sleep(2.0)
        c.ongoing = 0
        went = await going
        routed.end(went, 1)
        return went, {await routed.order() for _ in range(3)}

    assert run(waited()) == ("c", {"abc", "bac", "cab"})


def test_a_call_that_is_given_up_counts_nowhere() -> None:
    """A request that is cancelled while all replicas are full leaves nothing outstanding."""

    async def left() -> str:
        a, b = Replica("a", places=1), Replica("b", places=1)
        routed = Routed("least-tokens", a, b)
        a.ongoing = b.ongoing = 1
        going = asyncio.create_task(routed.route(100))
        await asyncio.sleep(2.0)
        going.cancel()
        await asyncio.wait({going})
        return await routed.order()

    assert run(left()) == "ab"


def test_what_was_sent_to_a_replica_that_left_is_forgotten() -> None:
    """One that is listed again after it was gone starts empty; the others keep what they have."""

    async def came_back() -> tuple[str, str]:
        routed = Routed("least-tokens", *_named("a", "b"))
        for tokens in (500, 100):
            await routed.route(tokens)
        before = await routed.order()
        routed.router.update_replicas(routed.replicas[1:])
        routed.router.update_replicas(routed.replicas)
        return before, await routed.order()

    assert run(came_back()) == ("ba", "ab")


def test_a_call_that_is_tried_again_goes_elsewhere() -> None:
    """Replicas that had a call are left out, unless no other is left; where it goes is noted."""

    async def tried() -> tuple[list[str], list[str]]:
        routed = Routed("least-tokens", *_named("a", "b", "c"))
        tried: list[ReplicaID] = []
        went = [await routed.route(100, tried) for _ in range(4)]
        return went, [replica.unique_id for replica in tried]

    assert run(tried()) == (["a", "b", "c", "a"], ["a", "b", "c", "a"])


def test_ray_still_has_what_the_router_overrides() -> None:
    """Ray Serve's router is asked, told and corrected by these names."""
    from ray.serve.request_router import RequestRouter  # noqa: PLC0415

    for name in (
        "initialize_state",
        "choose_replicas",
        "_choose_replica_for_request",
        "on_request_completed",
        "update_replicas",
    ):
        ours = inspect.signature(getattr(PlannedRouter, name)).parameters
        theirs = inspect.signature(getattr(RequestRouter, name)).parameters
        assert name == "initialize_state" or list(ours) == list(theirs), name
    assert isinstance(RequestRouter.replica_queue_len_cache, property)
