"""How a prompt gets prefilled when replicas die, hang or refuse: with replicas of the test."""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from serving.protocol.messages import Prefilled, Refusal
from serving.request.retry import DIED, NO_REPLICA, TIMEOUT, LocalPrefill, choose_domain
from tests.serving.configs import unplanned
from tests.serving.virtual_time import run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from serving.replicas.remote_prefill import RemotePrefill, prefill_remotely

if TYPE_CHECKING:
    from collections.abc import Mapping

DONE = Prefilled(kv_transfer_params={}, replica="p0", queue_s=0.0, step_s=0.1)
MALFORMED = Refusal(status=400, message="no")
BROKEN = Refusal(status=500, message="the engine failed")
HANGS, DIES = "hangs", "dies"


class Replicas:
    """Prefill replicas that behave as told, one behaviour a call; the deadline is 5 s."""

    def __init__(self, live: Mapping[str, int | None], *behaviours: object) -> None:
        """Keep what to do."""
        self._live = dict(live)
        self._behaviours = list(behaviours)
        self.asked: list[str] = []
        self.given_up_s: list[float] = []

    def live(self) -> Mapping[str, int | None]:
        """Return the live replicas."""
        return self._live

    async def call(self, domain: str, _kind: str, _request: Any, tried: list[Any]) -> Any:  # noqa: ANN401
        """Do the next thing."""
        assert tried == self.asked
        self.asked.append(domain)
        tried.append(domain)
        behaviour = self._behaviours.pop(0)
        if behaviour == HANGS:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                self.given_up_s.append(asyncio.get_running_loop().time())
                raise
        if behaviour == DIES:
            self._live[domain] = (self._live[domain] or 1) - 1
            raise ConnectionError
        return behaviour


def _ask(replicas: Replicas, fallback: str = "fail") -> object:
    config = unplanned(prefill_deadline_s=5.0, kv_wait_deadline_s=1.0, fallback=fallback)
    return run(prefill_remotely(replicas, "completions", None, config))


def test_the_first_replica_that_answers_is_enough() -> None:
    """No second call is made without need."""
    replicas = Replicas({"a": 2}, DONE)
    assert _ask(replicas) == RemotePrefill(prefilled=DONE, failures=())
    assert replicas.asked == ["a"]


@pytest.mark.parametrize("failure", [DIES, BROKEN])
def test_one_failure_is_made_good(failure: object) -> None:
    """A replica that dies or breaks costs one attempt, not the request."""
    replicas = Replicas({"a": 2}, failure, DONE)
    assert _ask(replicas) == RemotePrefill(prefilled=DONE, failures=(DIED,))


def test_a_hanging_replica_is_given_up() -> None:
    """At half of the deadline a call is ended and another replica asked."""
    replicas = Replicas({"a": 2}, HANGS, DONE)
    assert _ask(replicas) == RemotePrefill(prefilled=DONE, failures=(TIMEOUT,))
    assert replicas.given_up_s == [2.5]


def test_never_more_than_two_attempts() -> None:
    """After the second failure the client is told, or decode computes the prompt."""
    refusal = _ask(Replicas({"a": 9}, DIES, DIES))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (503, DIED)
    local = _ask(Replicas({"a": 9}, DIES, BROKEN), fallback="local")
    assert local == LocalPrefill(path="fallback-local", reason=DIED)


def test_the_last_replica_that_dies_leaves_none() -> None:
    """Without another replica there is no second attempt, and the reason is reported."""
    replicas = Replicas({"a": 1}, DIES)
    refusal = _ask(replicas)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code, replicas.asked) == (503, NO_REPLICA, ["a"])


def test_all_hang() -> None:
    """The deadline holds over all attempts together."""
    replicas = Replicas({"a": 2}, HANGS, HANGS)
    refusal = _ask(replicas)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (504, TIMEOUT)
    assert replicas.given_up_s == [2.5, 5.0]


def test_what_the_client_did_wrong_is_not_tried_again() -> None:
    """A request that prefill refuses is refused."""
    replicas = Replicas({"a": 2}, MALFORMED)
    assert _ask(replicas) == MALFORMED
    assert replicas.asked == ["a"]


def test_a_client_that_leaves_ends_the_call() -> None:
    """Cancelling the request cancels prefill."""
    replicas = Replicas({"a": 2}, HANGS)
    config = unplanned(prefill_deadline_s=60.0, kv_wait_deadline_s=1.0)

    async def leave() -> None:
        asking = asyncio.create_task(prefill_remotely(replicas, "chat", None, config))
        await asyncio.sleep(1.0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(leave())
    assert replicas.given_up_s == [1.0]


@pytest.mark.parametrize(
    ("live", "tried", "chosen"),
    [
        ({"a": 1, "b": 1}, None, "a"),
        ({"a": 0, "b": 1}, None, "b"),
        ({"a": None, "b": 1}, None, "a"),
        ({"a": 2, "b": 1}, "a", "a"),
        ({"a": 1, "b": 1}, "a", "b"),
        ({"a": 1, "b": 0}, "a", "a"),
        ({"a": 0, "b": 0}, None, "a"),
    ],
)
def test_the_nearest_domain_first(
    live: dict[str, int | None], tried: str | None, chosen: str
) -> None:
    """The own domain is asked as long as it has a replica that did not just fail."""
    assert choose_domain(live, tried) == chosen
