"""Ray Serve's handles behind the endpoint: calls, cancellations and refusals."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from serving.protocol.messages import PrefillTiming, Refusal, RequestRefused
from tests.serving.configs import unplanned
from tests.serving.virtual_time import run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.exceptions import RayActorError

    from serving.cluster import serve_compat
    from serving.replicas import serve_backend
    from serving.replicas.serve_backend import ServeBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


CONFIG = unplanned(prefill_deadline_s=1.0, kv_wait_deadline_s=1.0, max_model_len=60, max_num_seqs=1)
"""A first token has 4 s, each further token of an answer in one piece 1 s."""

TIMING = PrefillTiming(prompt_tokens=3, seconds=0.1, queue_s=0.0, step_s=0.1)


class Response:
    """A call under way: some items, then an exception, if any."""

    def __init__(self, items: list[Any], error: Exception | None, pause_s: float = 0.0) -> None:
        """Say what it does."""
        self._items = self._run(items, error, pause_s)
        self.cancelled = False

    async def _run(
        self, items: list[Any], error: Exception | None, pause_s: float
    ) -> AsyncIterator[Any]:
        """Do it."""
        for item in items:
            await asyncio.sleep(pause_s)
            yield item
        if error is not None:
            raise error

    def __aiter__(self) -> Response:
        """Be what Ray Serve returns of a stream."""
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401
        """Go on."""
        return await anext(self._items)

    def __await__(self) -> Any:  # noqa: ANN401
        """Be what Ray Serve returns of a call with one answer."""
        return anext(self._items).__await__()

    def cancel(self) -> None:
        """Note it."""
        self.cancelled = True


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], Response]]:
    """Return what asks for an answer, through a handle with so many live replicas."""

    def make(
        response: Response,
        *,
        live: int | None = 1,
        later: int | None = 1,
        take: int | None = None,
        **body: object,
    ) -> tuple[list[Any], Response]:
        monkeypatch.setattr(serve_backend, "live_replicas", lambda _handle: live)
        monkeypatch.setattr(serve_compat, "live_replicas", lambda _handle: later)
        answer = SimpleNamespace(remote=lambda _kind, _body: response)
        handle: Any = SimpleNamespace(answer=answer, deployment_name="Decode:demo")
        handle.options = lambda **_options: handle
        servers = ServeBackend({"d0": handle}, {"d0": handle}, CONFIG)

        async def listen() -> list[Any]:
            taken: list[Any] = []
            stream: Any = servers.answer("d0", "chat", {"stream": True, **body})
            async for item in stream:
                taken.append(item)
                if len(taken) == take:
                    await stream.aclose()
                    break
            return taken

        return run(listen()), response

    return make


def test_an_answer_that_ends_is_not_cancelled(ask: Callable[..., Any]) -> None:
    """Everything comes through, and the call is not cancelled."""
    taken, response = ask(Response([1, 2, 3], None))
    assert (taken, response.cancelled) == ([1, 2, 3], False)


def test_an_answer_that_is_not_read_is_cancelled(ask: Callable[..., Any]) -> None:
    """Closing the stream cancels the call."""
    taken, response = ask(Response([1, 2, 3], None), take=2)
    assert (taken, response.cancelled) == ([1, 2], True)


@pytest.mark.parametrize(
    ("response", "live"),
    [
        (Response([1], None), 0),
        (Response([], RayActorError()), 1),
        (Response([1], None, pause_s=5.0), 1),
    ],
)
def test_without_a_replica_it_is_refused(
    ask: Callable[..., Any], response: Response, live: int
) -> None:
    """No replica, one that dies first and one that hangs: 503 and when to come again."""
    with pytest.raises(RequestRefused) as refused:
        ask(response, live=live)
    refusal = refused.value.refusal
    assert (refusal.status, refusal.code) == (503, "no_replica")
    assert refusal.retry_after_s


def test_the_last_replica_may_die_while_a_call_waits_in_serve(ask: Callable[..., Any]) -> None:
    """Serve would hold the call; a whole answer has no limit that would end the wait."""
    response = Response([1], None, pause_s=5.0)
    with pytest.raises(RequestRefused) as refused:
        ask(response, later=0, stream=False)
    assert refused.value.refusal.code == "no_replica"
    assert response.cancelled


def test_a_death_midway_is_no_refusal(ask: Callable[..., Any]) -> None:
    """After the first item the stream fails: the endpoint ends it with an error event."""
    with pytest.raises(RayActorError):
        ask(Response([1, 2], RayActorError()))


def test_whole_answers_may_take_longer(ask: Callable[..., Any]) -> None:
    """The limit is for the first token; of an answer in one piece that is not the first item."""
    taken, _ = ask(Response([1], None, pause_s=5.0), stream=False)
    assert taken == [1]


def test_bugs_are_not_hidden_as_missing_replicas(ask: Callable[..., Any]) -> None:
    """What our own servers raise stays what it is."""
    with pytest.raises(ZeroDivisionError):
        ask(Response([], ZeroDivisionError()))


@pytest.mark.parametrize("body", [{"stream": False}, {"stream": True, "use_beam_search": True}])
def test_whole_answers_end_too(ask: Callable[..., Any], body: dict[str, object]) -> None:
    """A replica that hangs as a whole costs a client the tokens it asked for, and no more."""
    response = Response([1], None, pause_s=3600.0)
    with pytest.raises(RequestRefused) as refused:
        ask(response, max_tokens=0, **body)
    refusal = refused.value.refusal
    assert (refusal.status, refusal.code) == (504, "answer-timeout")
    assert refusal.retry_after_s
    assert response.cancelled


@pytest.fixture
def time_prefill(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what times a prompt, through a handle with so many live replicas."""

    def make(response: Response, *, live: int = 1, later: int = 1, **body: object) -> Any:  # noqa: ANN401
        monkeypatch.setattr(serve_backend, "live_replicas", lambda _handle: live)
        monkeypatch.setattr(serve_compat, "live_replicas", lambda _handle: later)
        handle: Any = SimpleNamespace(deployment_name="Prefill:demo")
        handle.time_prefill = SimpleNamespace(remote=lambda _body: response)
        servers = ServeBackend({}, {"d0": handle}, CONFIG)
        return run(servers.time_prefill({"prompt": [1, 2, 3], **body}))

    return make


def test_a_prompt_is_timed(time_prefill: Callable[..., Any]) -> None:
    """The replica's answer comes through, whatever it is, and the call is left alone."""
    for answer in (TIMING, Refusal(status=400, message="No such prompt.")):
        response = Response([answer], None)
        assert time_prefill(response) == answer
        assert not response.cancelled


@pytest.mark.parametrize(
    ("response", "live", "later", "status", "code"),
    [
        (Response([TIMING], None), 0, 0, 503, "no_replica"),
        (Response([], RayActorError()), 1, 1, 503, "no_replica"),
        (Response([TIMING], None, pause_s=3600.0), 1, 0, 503, "no_replica"),
        (Response([TIMING], None, pause_s=3600.0), 1, 1, 504, "prefill-timeout"),
    ],
)
def test_no_prompt_is_waited_for_in_vain(
    time_prefill: Callable[..., Any],
    response: Response,
    live: int,
    later: int,
    status: int,
    code: str,
) -> None:
    """No replica, one that dies, the last one gone and one that hangs: refused, and why."""
    with pytest.raises(RequestRefused) as refused:
        time_prefill(response, live=live, later=later)
    refusal = refused.value.refusal
    assert (refusal.status, refusal.code) == (status, code)
    assert refusal.retry_after_s


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
    ],
)
def test_what_never_goes_through_prefill_is_not_timed_there(
    time_prefill: Callable[..., Any], body: dict[str, object], param: str
) -> None:
    """It is refused with its parameter; vLLM would answer without the times."""
    refusal = time_prefill(Response([], ZeroDivisionError()), **body)
    assert (refusal.status, refusal.param) == (400, param)
    assert param in refusal.message
