"""Replica choice: the plan's policy on what is outstanding, by Ray Serve's own machinery."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Sequence

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, RequestRouter

from minicluster.routing import POLICIES, find_policy
from serving.replicas.router import PlannedRouter
from tests.serving.virtual_time import run


class Replica:
    """A prefill replica as Ray Serve's router sees it: its id, its places, and what is taken."""

    def __init__(
        self, name: str, *, places: int = 1000, ongoing: int = 0, group: str | None = None
    ) -> None:
        deployment = DeploymentID(name="Prefill:demo")
        self.replica_id = ReplicaID(unique_id=name, deployment_id=deployment)
        self.max_ongoing_requests = places
        self.ongoing = ongoing
        self.routing_stats = {} if group is None else {"group": group}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Return how many requests the replica has, from all routers."""
        assert deadline_s > 0
        return self.ongoing


class Routed:
    """Our router inside Ray Serve's machinery, over replicas of the test; policies draw by seed."""

    def __init__(self, policy: str, *replicas: Replica | str) -> None:
        self.router = PlannedRouter(
            DeploymentID(name="Prefill:demo"),
            DeploymentHandleSource.REPLICA,
            get_curr_time_s=time.monotonic,
        )
        self.router.initialize_state(policy=policy, cached_tokens=100_000)
        self.router._random = random.Random(1)  # noqa: S311
        self.replicas = [Replica(each) if isinstance(each, str) else each for each in replicas]
        self.router.update_replicas(self.replicas)
        self._sent = 0

    async def route(
        self,
        tokens: int = 1,
        tried: list[ReplicaID] | None = None,
        only: str | None = None,
        token: int = 1,
    ) -> str:
        """Return where a call goes whose prompt is so many times the same token."""
        self._sent += 1
        name = f"request-{self._sent}"
        pending = PendingRequest(
            args=["completions", {"prompt": [token] * tokens}],
            kwargs=({} if tried is None else {"tried": tried})
            | ({} if only is None else {"only": only}),
            metadata=RequestMetadata(request_id=name, internal_request_id=name),
        )
        replica = await self.router._choose_replica_for_request(pending)
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


def _dealt(policy: str, names: str, lengths: Sequence[int]) -> str:
    """Return where calls with prompts of these lengths go, one after the other."""

    async def dealt() -> str:
        routed = Routed(policy, *names)
        return "".join([await routed.route(tokens) for tokens in lengths])

    return run(dealt())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_policy_sees_a_burst_as_it_grows(policy: str) -> None:
    """Each choice is the policy's on what was sent before it, in the policy's unit, by one seed."""
    choose: Callable[..., int] = find_policy(policy).choose
    rng, loads = random.Random(1), [0.0, 0.0, 0.0]  # noqa: S311
    lengths = [random.Random(2).randint(1, 900) for _ in range(200)]  # noqa: S311
    expected = ""
    for turn, tokens in enumerate(lengths):
        at = choose(loads, rng, turn)
        loads[at] += tokens if find_policy(policy).counts_tokens else 1
        expected += "abc"[at]
    assert _dealt(policy, "abc", lengths) == expected


@pytest.mark.parametrize(("groups", "taken"), [("1122", "acbda"), ("    ", "abcda")])
def test_a_prompt_goes_to_the_idle_group(groups: str, taken: str) -> None:
    """Ranks that say their group share its load; of equal ranks those of the idle group come."""

    async def routed() -> str:
        ranks = [Replica(n, group=g.strip() or None) for n, g in zip("abcd", groups, strict=True)]
        deployed = Routed("least-tokens", *ranks)
        return "".join([await deployed.route(10) for _ in taken])

    assert run(routed()) == taken


def test_a_call_for_one_replica_goes_there_and_is_no_load() -> None:
    """It takes no turn of the policy, whoever is next; a replica that is gone is not replaced."""

    async def sent() -> tuple[str, list[list[object]]]:
        routed = Routed("round-robin", *"abc")
        seen = ""
        for _ in range(3):
            seen += await routed.route()
            seen += (await routed.route(only="b")).upper()
        nameless = RequestMetadata(request_id="z", internal_request_id="z")
        gone = PendingRequest(args=[], kwargs={"only": "z"}, metadata=nameless)
        return seen, await routed.router.choose_replicas(routed.replicas, gone)

    assert run(sent()) == ("aBbBcB", [[]])


def test_other_replicas_are_tried_by_their_load() -> None:
    """Behind the policy's choice the emptiest comes first, and the fullest last."""

    async def tried() -> tuple[str, str]:
        routed = Routed("least-tokens", *"abcd")
        for tokens in (300, 100, 200):
            await routed.route(tokens)
        by_tokens = await routed.order()
        turns = Routed("round-robin", *"abc")
        for _ in range(4):  # a has two, b and c one; then b's ends, and b is next in turn
            await turns.route()
        turns.end("b", 2)
        await turns.order()
        return by_tokens, await turns.order()

    assert run(tried()) == ("dbca", "cba")


def test_a_full_replica_is_passed_over_and_the_call_counts_where_it_went() -> None:
    """The next by load takes it; the full one is as empty as before for the calls after."""

    async def routed_on() -> tuple[list[str], str]:
        routed = Routed("least-tokens", Replica("a", places=1, ongoing=1), "b", "c")
        return [await routed.route(tokens) for tokens in (100, 100, 500)], await routed.order()

    # a is full of what another sent: each call tries it first.
    assert run(routed_on()) == (["b", "c", "b"], "acb")


@pytest.mark.parametrize(
    ("policy", "ends", "orders"),
    [("round-robin", True, {"abc", "bac", "cab"}), ("least-tokens", False, {"abc"})],
)
def test_a_call_that_waits_for_a_place_counts_once(
    policy: str, orders: set[str], *, ends: bool
) -> None:
    """However often it tries while all are full, ended or given up, nothing of it is left."""

    async def waited() -> set[str]:
        replicas = [Replica(name, places=1, ongoing=1) for name in "abc"]
        routed = Routed(policy, *replicas)
        going = asyncio.create_task(routed.route(100))
        await asyncio.sleep(2.0)
        if ends:
            replicas[2].ongoing = 0
            assert await going == "c"
            routed.end("c", 1)
        else:
            going.cancel()
            await asyncio.wait({going})
        return {await routed.order() for _ in range(3)}

    assert run(waited()) == orders


def test_what_was_sent_to_a_replica_that_left_is_forgotten() -> None:
    """One that is listed again after it was gone starts empty; the others keep what they have."""

    async def came_back() -> tuple[str, str]:
        routed = Routed("least-tokens", *"ab")
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
        routed = Routed("least-tokens", *"abc")
        tried: list[ReplicaID] = []
        went = [await routed.route(100, tried) for _ in range(4)]
        return went, [replica.unique_id for replica in tried]

    assert run(tried()) == (["a", "b", "c", "a"], ["a", "b", "c", "a"])


def test_ray_still_has_what_the_router_overrides() -> None:
    """Ray Serve's router is asked, told and corrected by these names."""
    for name in (
        "choose_replicas",
        "_choose_replica_for_request",
        "on_request_completed",
        "update_replicas",
    ):
        ours = inspect.signature(getattr(PlannedRouter, name)).parameters
        assert list(ours) == list(inspect.signature(getattr(RequestRouter, name)).parameters), name
    assert hasattr(RequestRouter, "initialize_state")
    assert isinstance(RequestRouter.replica_queue_len_cache, property)


def test_prompts_that_begin_alike_go_to_one_replica_until_it_has_too_much_to_do() -> None:
    """The policy compares what each replica would have to compute, new tokens included."""

    async def routed() -> str:
        deployed = Routed("prefix-aware", *"abc")
        taken = "".join([await deployed.route(1024, token=token) for token in (1, 2, 3)])
        for number, name in enumerate(taken, 1):
            deployed.end(name, number)
        taken += "".join([await deployed.route(1100, token=token) for token in (3, 2, 1, 3, 3)])
        deployed.router.update_replicas(deployed.replicas[:2])
        return taken + await deployed.route(1100, token=3)

    taken = run(routed())
    first, later, gone = taken[:3], taken[3:8], taken[8:]
    assert sorted(first) == ["a", "b", "c"]
    assert later == first[::-1] + first[2] * 2
    assert gone in {"a", "b"}, "the replica that had it is gone"
