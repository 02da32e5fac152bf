"""Waiting for a replica's answer, as long as there is a replica."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.virtual_time import run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from serving.cluster import serve_compat
    from serving.cluster.serve_compat import NoReplica, while_live
    from serving.replicas.remote_prefill import PrefillHandles


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return how many replicas there are at each look; the last stays."""
    counts: list[int | None] = [1]
    monkeypatch.setattr(
        serve_compat, "live_replicas", lambda _: counts.pop(0) if len(counts) > 1 else counts[0]
    )
    return counts


HANDLE = SimpleNamespace(deployment_name="Prefill:demo")


async def answer_after(pause_s: float) -> str:
    """Answer a little later."""
    await asyncio.sleep(pause_s)
    return "tokens"


def test_an_answer_comes_through_however_long_it_takes(live: list[int | None]) -> None:
    """Replicas that live, or are not known yet, are waited for."""
    live[:] = [None, None, 1]
    assert run(while_live(HANDLE, answer_after(600.0))) == "tokens"


def test_it_ends_when_no_replica_is_left(live: list[int | None]) -> None:
    """A call that no replica is left for raises an error that names the deployment."""
    live[:] = [1, 1, 0]
    with pytest.raises(NoReplica, match="Prefill:demo"):
        run(while_live(HANDLE, answer_after(5.0)))


def test_what_the_call_raises_is_raised(live: list[int | None]) -> None:
    """The call's own exception comes through, even if no replica is left by then."""
    live[:] = [0]

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(while_live(HANDLE, fail()))


@pytest.mark.usefixtures("live")
def test_a_deadline_ends_the_call() -> None:
    """A deadline around it cancels what it waits for."""
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(5.0)
        finally:
            ended.append(True)

    async def give_up() -> None:
        async with asyncio.timeout(1.0):
            await while_live(HANDLE, work())
        await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        run(give_up())
    assert ended == [True]


@pytest.mark.parametrize("left", [0, 1])
def test_a_prefill_call_is_cancelled_with_its_wait(live: list[int | None], left: int) -> None:
    """Whether no replica is left or the deadline passed, Serve must not go on trying."""
    live[:] = [left]
    cancelled = []

    class Response:
        def __await__(self) -> Any:  # noqa: ANN401
            return answer_after(5.0).__await__()

        def cancel(self) -> None:
            cancelled.append(True)

    handle: Any = SimpleNamespace(
        deployment_name="Prefill:demo",
        prefill=SimpleNamespace(remote=lambda *_args, **_kwargs: Response()),
    )
    handle.options = lambda **_options: handle

    async def give_up() -> None:
        async with asyncio.timeout(1.0):
            await PrefillHandles({"d0": handle}).call("d0", "chat", None, [])

    with pytest.raises(TimeoutError if left else NoReplica):
        run(give_up())
    assert cancelled == [True]
