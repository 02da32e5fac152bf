"""Replica choice: the plan's policy on what is outstanding, by Ray Serve's own machinery."""

from __future__ import annotations

import asyncio
import inspect
import random
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.outstanding import Outstanding
from serving.prompt_size import prompt_tokens
from sizing.routing import POLICIES, chooser, counts_tokens

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from serving.router import PlannedRouter

if TYPE_CHECKING:
    from collections.abc import Callable

EVENTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 9), st.floats(1, 1000)), max_size=60
)


@given(EVENTS)
def test_books_equal_what_is_under_way(events: list[tuple[bool, int, int, float]]) -> None:
    """After any adds and removes, repeated or of things unknown, loads are the sums of the rest."""
    books, under_way = Outstanding(), dict[tuple[int, int], float]()
    for adds, replica, request, tokens in events:
        if adds:
            books.add(replica, request, tokens)
            under_way.setdefault((replica, request), tokens)
        else:
            books.remove(replica, request)
            under_way.pop((replica, request), None)
    for replica in range(3):
        mine = [tokens for (at, _), tokens in under_way.items() if at == replica]
        assert books.requests(replica) == len(mine)
        assert books.tokens(replica) == pytest.approx(sum(mine), abs=1e-6)
        if not mine:
            assert books.tokens(replica) == 0


def test_requests_of_others_count_as_ours_do() -> None:
    """A replica that says it has more requests than we sent is loaded by our mean prompt."""
    books = Outstanding()
    books.add("a", 1, 100.0)
    books.add("a", 2, 300.0)
    assert books.requests("a", 5) == 5
    assert books.tokens("a", 5) == 400 + 3 * 200
    assert books.tokens("b", 1) == 200
    assert books.tokens("a", 0) == 400  # what it said is older than what we sent


def test_replicas_that_are_gone_are_forgotten() -> None:
    """Neither requests nor tokens of a dead replica remain."""
    books = Outstanding()
    books.add("a", 1, 100.0)
    books.add("b", 2, 100.0)
    books.forget({"b"})
    assert (books.requests("a"), books.tokens("a")) == (0, 0)
    assert (books.requests("b"), books.tokens("b")) == (1, 100)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([5, 6, 7], 3), ("abcdefgh", 2), ([{"role": "user", "content": "x" * 40}], 10), (None, 1)],
)
def test_prompts_are_sized_before_they_are_tokenized(prompt: object, tokens: float) -> None:
    """Ids are counted; text is guessed from its bytes; nothing is an error."""
    assert prompt_tokens(prompt) == tokens


def _router(policy: str, replicas: list[str]) -> Any:  # noqa: ANN401
    """Return our router over replicas that always accept, without Ray around it."""
    router: Any = PlannedRouter.__new__(PlannedRouter)
    router.initialize_state(policy=policy)
    router._replica_queue_len_cache = SimpleNamespace(get=lambda _replica: None)
    router._random = random.Random(1)  # noqa: S311
    router.given = [SimpleNamespace(replica_id=replica) for replica in replicas]
    return router


def _pending(number: int, prompt: list[int]) -> Any:  # noqa: ANN401
    """Return a call as Ray Serve hands it to its router."""
    return SimpleNamespace(
        args=(SimpleNamespace(prompt=prompt),),
        kwargs={},
        metadata=SimpleNamespace(internal_request_id=str(number)),
        routing_context=SimpleNamespace(should_backoff=False),
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_burst_goes_where_the_simulator_sends_it(policy: str) -> None:
    """Prompts that come all at once are spread by the very choices that the simulator makes."""
    router = _router(policy, ["a", "b", "c"])
    choose: Callable[..., int] = chooser(policy)
    rng, loads = random.Random(1), [0.0, 0.0, 0.0]  # noqa: S311
    lengths = random.Random(2)  # noqa: S311
    for turn in range(200):
        prompt = [1] * lengths.randint(1, 900)
        pending = _pending(turn, prompt)
        [[first], *rest] = asyncio.run(router.choose_replicas(router.given, pending))
        expected = choose(loads, rng, turn)
        loads[expected] += len(prompt) if counts_tokens(policy) else 1
        assert first.replica_id == "abc"[expected]
        assert {replica.replica_id for [replica] in rest} == set("abc") - {first.replica_id}
        assert pending.routing_context.should_backoff


def test_a_choice_that_is_made_again_counts_once() -> None:
    """If the first choice was full, only the last one is outstanding, until it completes."""
    router = _router("least-tokens", ["a", "b"])
    pending = _pending(7, [1] * 50)
    for _ in range(3):
        asyncio.run(router.choose_replicas(router.given, pending))
    assert router._outstanding.tokens("a") + router._outstanding.tokens("b") == 50
    for replica in "ab":
        router.on_request_completed(replica, "7")
    assert router._outstanding.tokens("a") == router._outstanding.tokens("b") == 0


def test_a_call_that_is_tried_again_goes_elsewhere() -> None:
    """Replicas that had a call are left out, unless no other is left."""
    router = _router("least-tokens", ["a", "b", "c"])
    pending = _pending(8, [1])
    pending.kwargs["asked"] = ["a", "c"]
    assert _offered(router, pending) == {"b"}
    pending.kwargs["asked"] = ["a", "b", "c"]
    assert _offered(router, pending) == {"a", "b", "c"}


def _offered(router: Any, pending: Any) -> set[str]:  # noqa: ANN401
    """Return the replicas that the router offers for a call."""
    found = asyncio.run(router.choose_replicas(router.given, pending))
    return {replica.replica_id for [replica] in found}


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
