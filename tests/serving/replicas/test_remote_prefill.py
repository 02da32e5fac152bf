"""How a prompt gets prefilled when replicas die, hang or refuse: with replicas of the test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.protocol.messages import (
    DIED,
    NO_REPLICA,
    TIMEOUT,
    EndpointConfig,
    Prefilled,
    PromptPath,
    Refusal,
)
from serving.replicas.backend import choose_domain, prefill_remotely
from tests.serving.configs import unplanned
from tests.serving.virtual_time import run

DONE = Prefilled(kv_transfer_params={}, replica="p0", queue_s=0.0, step_s=0.1)
BODY = {"messages": []}
MALFORMED = Refusal(status=400, message="no")
BROKEN = Refusal(status=500, message="the engine failed")
HANGS, DIES, BUSY, FULL = "hangs", "dies", "busy", "full"


class Replicas:
    """
    Prefill replicas that behave as told, one behaviour a call; the deadline is 5 s.

    A busy one has answered others when it is asked about, and this call after 4 s. Where all are
    full, a call waits 4 s for a place.
    """

    def __init__(self, live: int, *behaviours: object) -> None:
        self._live: int | None = live
        self._behaviours = list(behaviours)
        self._busy = BUSY in behaviours
        self.asked: list[str] = []
        self.given_up_s: list[float] = []

    def live(self, _domain: str) -> int | None:
        return self._live

    async def answered_within(self, _domain: str, replica: str, _age_s: float) -> bool:
        assert replica == self.asked[-1]
        return self._busy

    async def call(self, domain: str, kind: str, body: object, tried: list[Any]) -> Any:  # noqa: ANN401
        assert (kind, body, tried) == ("chat", BODY, self.asked)
        behaviour = self._behaviours.pop(0)
        if behaviour == FULL:
            await asyncio.sleep(4.0)
            behaviour = DONE
        self.asked.append(domain)
        tried.append(domain)
        if behaviour == BUSY:
            await asyncio.sleep(4.0)
            return DONE
        if behaviour == HANGS:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                self.given_up_s.append(asyncio.get_running_loop().time())
                raise
        if behaviour == DIES:
            self._live = (self._live or 1) - 1
            raise ConnectionError
        return behaviour


async def _asked(replicas: Replicas, config: EndpointConfig) -> PromptPath | Refusal:
    pool: Any = replicas
    return await prefill_remotely(pool, ["a"], "chat", BODY, config)


def _ask(replicas: Replicas, fallback: str = "fail") -> Any:  # noqa: ANN401
    config = unplanned(prefill_deadline_s=5.0, kv_wait_deadline_s=1.0, fallback=fallback)
    return run(_asked(replicas, config))


@pytest.mark.parametrize(
    ("behaviours", "failures", "given_up_s", "seconds"),
    [
        ((DONE,), (), [], 0.0),  # no second call without need
        ((DIES, DONE), (DIED,), [], 0.0),
        ((BROKEN, DONE), (DIED,), [], 0.0),
        ((HANGS, DONE), (TIMEOUT,), [2.5], 2.5),  # at half of the deadline
        ((FULL,), (), [], 4.0),  # no replica has failed
        ((BUSY,), (), [], 4.0),  # it has a queue: a second call would only make that longer
    ],
)
def test_one_failure_costs_one_attempt_not_the_request(
    behaviours: tuple[object, ...],
    failures: tuple[str, ...],
    given_up_s: list[float],
    seconds: float,
) -> None:
    replicas = Replicas(2, *behaviours)
    found = _ask(replicas)
    assert (found.prefilled, found.seconds) == (DONE, seconds)
    reason = failures[-1] if failures else ""
    assert (found.path, found.reason) == ("retried" if failures else "remote", reason)
    assert len(replicas.asked) == len(behaviours)
    assert replicas.given_up_s == given_up_s


@pytest.mark.parametrize(
    ("live", "behaviours", "status", "reason"),
    [
        (9, (DIES, DIES), 503, DIED),
        (9, (DIES, BROKEN), 503, DIED),
        (0, (), 503, NO_REPLICA),
        (1, (HANGS,), 504, TIMEOUT),  # the only one has all of the time
        (1, (DIES,), 503, NO_REPLICA),  # without another replica there is no second attempt
        (2, (HANGS, HANGS), 504, TIMEOUT),
    ],
)
def test_after_the_last_attempt_the_client_is_told(
    live: int, behaviours: tuple[object, ...], status: int, reason: str
) -> None:
    """Never more than two; or decode computes the prompt. The deadline holds over all of them."""
    replicas = Replicas(live, *behaviours)
    refusal = _ask(replicas)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (status, reason)
    assert len(replicas.asked) == len(behaviours)
    assert replicas.given_up_s == [2.5, 5.0][2 - behaviours.count(HANGS) :]
    local = _ask(Replicas(live, *behaviours), fallback="local")
    spent_s = [0.0, 5.0][HANGS in behaviours]
    assert local == PromptPath(path="fallback-local", reason=reason, seconds=spent_s)


def test_what_the_client_did_wrong_is_not_tried_again() -> None:
    replicas = Replicas(2, MALFORMED)
    assert (_ask(replicas), replicas.asked) == (MALFORMED, ["a"])


def test_a_client_that_leaves_ends_the_call() -> None:
    replicas = Replicas(2, HANGS)
    config = unplanned(prefill_deadline_s=60.0, kv_wait_deadline_s=1.0)

    async def leave() -> None:
        asking = asyncio.create_task(_asked(replicas, config))
        await asyncio.sleep(1.0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)

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
