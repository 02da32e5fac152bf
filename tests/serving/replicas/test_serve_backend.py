"""Ray Serve's handles behind the endpoint: calls, cancellations, refusals and time limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from minicluster.plan import Plan, Routing
from minicluster.specs.slo import SloSpec
from serving.cluster import serve_compat
from serving.cluster.serve_compat import NoReplica
from serving.protocol.endpoint_config import EndpointConfig, endpoint_config
from serving.protocol.frames import Kind
from serving.protocol.messages import (
    AnswerEnd,
    ChannelPlace,
    EngineFailed,
    FirstChunk,
    LocalPrefill,
    Prefilled,
    PrefillTiming,
    Refusal,
    RequestPhases,
    RequestRefused,
)
from serving.replicas import remote_prefill, serve_backend
from serving.replicas.remote_prefill import PrefillHandles
from serving.replicas.serve_backend import (
    ServeBackend,
    event_limit_s,
    first_token_limit_s,
    whole_answer_limit_s,
)
from serving.replicas.token_channels import ChannelLostError
from tests.serving.configs import unplanned
from tests.serving.virtual_time import run

CONFIG = unplanned(prefill_deadline_s=1.0, kv_wait_deadline_s=1.0, max_model_len=60, max_num_seqs=1)
"""A first token has 4 s, each token asked for 1 s beyond."""

PREFILLED = Prefilled(kv_transfer_params={}, replica="p0", queue_s=0.0, step_s=0.1)
TIMING = PrefillTiming(prompt_tokens=3, seconds=0.1, queue_s=0.0, step_s=0.1)


PHASES = RequestPhases(prefill_s=0.0, decode_s=0.0)
PLACE = ChannelPlace(host="h", port=1, secret="", answer=1)
BEGUN = FirstChunk(phases=PHASES, first="0", place=PLACE)
WHOLE_ANSWER = FirstChunk(phases=PHASES, first={})


WHOLE, HOUR_S = {"stream": False}, 3600.0


class Response:
    """A call under way, as Ray Serve returns it: some items, then an exception, if any."""

    def __init__(
        self,
        *items: Any,  # noqa: ANN401
        error: Exception | None = None,
        pause_s: float = 0.0,
        stands_s: float = 0.0,
    ) -> None:
        self._items = self._run(items, error, pause_s, stands_s)
        self.cancelled = False

    async def _run(
        self, items: tuple[Any, ...], error: Exception | None, pause_s: float, stands_s: float
    ) -> AsyncIterator[Any]:
        for item in items:
            await asyncio.sleep(pause_s)
            yield item
        await asyncio.sleep(stands_s)
        if error is not None:
            raise error

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401
        return await anext(self._items)

    def __await__(self) -> Any:  # noqa: ANN401
        return anext(self._items).__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Channel:
    """The channel of one answer: events, then an end, an error or nothing more."""

    def __init__(self, *texts: bytes, end: str | None = "done", pause_s: float = 0.0) -> None:
        self._texts, self._end, self._pause_s = texts, end, pause_s
        self.told: list[Kind] = []

    def attach(self, place: ChannelPlace, reader: Any) -> None:  # noqa: ANN401
        assert place == PLACE
        self._sending = asyncio.create_task(self._send(reader))

    def tell(self, place: ChannelPlace, kind: Kind) -> None:
        assert place == PLACE
        self.told.append(kind)

    async def _send(self, reader: Any) -> None:  # noqa: ANN401
        for text in self._texts:
            await asyncio.sleep(self._pause_s)
            reader.events(text)
        if self._end == "lost":
            reader.lost(ChannelLostError("cut"))
        elif self._end is not None:
            failed = "broken" if self._end == "broken" else ""
            reader.ended({"usage": {"completion_tokens": 2}, "text": "[DONE]", "error": failed})


class Collected:
    """What an answer brings."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.end: AnswerEnd | None = None
        self.over = asyncio.Event()

    def events(self, text: bytes) -> None:
        self.texts.append(text)

    def ended(self, end: AnswerEnd) -> None:
        assert self.end is None
        self.end = end
        self.over.set()


def _handle(response: Response | None = None, prompt_tokens: int | None = None) -> Any:  # noqa: ANN401
    """Return a handle whose calls are *response*, but for a prompt that is done or counted."""

    def answering(make: Callable[[], Response | None]) -> Any:  # noqa: ANN401
        def remote(*given: Any, **_named: object) -> Response | None:  # noqa: ANN401
            handle.given.append(given)
            return make()

        return SimpleNamespace(remote=remote)

    handle = SimpleNamespace(
        answer=answering(lambda: response),
        time_prefill=answering(lambda: response),
        prefill=answering(lambda: response or Response(PREFILLED)),
        prompt_tokens=answering(lambda: Response(prompt_tokens)),
        deployment_name="Prefill:demo",
        given=[],
    )
    handle.options = lambda **_options: handle
    return handle


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return how many replicas there are at each look; the last stays."""
    counts: list[int | None] = [1]

    def look(_handle: object) -> int | None:
        return counts.pop(0) if len(counts) > 1 else counts[0]

    for module in (serve_compat, serve_backend, remote_prefill):
        monkeypatch.setattr(module, "live_replicas", look)
    return counts


def _backend(
    servers: dict[str, Any],
    prefill: dict[str, Any],
    channel: Channel | None = None,
    config: EndpointConfig = CONFIG,
) -> ServeBackend:
    return ServeBackend(servers, prefill, config, channel or Channel())  # type: ignore[arg-type]


def _ask(response: Response, **body: object) -> Any:  # noqa: ANN401
    """Return how an answer begins."""
    servers = _backend({"d0": _handle(response)}, {"d0": _handle()})
    return run(_asked(servers, **body))


async def _asked(servers: ServeBackend, **body: object) -> Any:  # noqa: ANN401
    answer = await servers.answer("d0", "chat", {"stream": True, **body})
    await asyncio.sleep(0)
    return answer if isinstance(answer, Refusal) else answer.chunk


def _read(response: Response, channel: Channel, *, holds_s: float = 0.0) -> Collected:
    """Return what a stream brings; its client stands still for *holds_s* after the first event."""

    async def read() -> Collected:
        servers = _backend({"d0": _handle(response)}, {"d0": _handle()}, channel)
        answer = await servers.answer("d0", "chat", {"stream": True})
        assert not isinstance(answer, Refusal)
        collected = Collected()
        answer.forward(collected)
        if holds_s:
            answer.hold(on=True)
            await asyncio.sleep(holds_s)
            answer.hold(on=False)
        await collected.over.wait()
        answer.close()
        return collected

    return run(read())


def _time(response: Response, **body: object) -> Any:  # noqa: ANN401
    servers = _backend({}, {"d0": _handle(response)})
    return run(servers.time_prefill({"prompt": [1, 2, 3], **body}))


def test_how_an_answer_begins(live: list[int | None]) -> None:
    """One in one piece may take longer; replicas may be not yet known."""
    live[:] = [None]
    slow = Response(WHOLE_ANSWER, pause_s=5.0)
    assert (_ask(slow, **WHOLE), slow.cancelled) == (WHOLE_ANSWER, False)
    begun = Response(BEGUN, stands_s=1.0)
    assert (_ask(begun), begun.cancelled) == (BEGUN, False)


@pytest.mark.usefixtures("live")
def test_an_answer_that_is_not_read_is_cancelled() -> None:
    """One that has ended, or came in one piece, is not."""

    async def closed(response: Response) -> tuple[bool, list[Kind]]:
        channel = Channel()
        servers = _backend({"d0": _handle(response)}, {}, channel)
        answer = await servers.answer("d0", "chat", {"stream": True})
        assert not isinstance(answer, Refusal)
        answer.close()
        answer.close()
        return response.cancelled, channel.told

    assert run(closed(Response(BEGUN, stands_s=9.0))) == (True, [Kind.DETACH])
    assert run(closed(Response(WHOLE_ANSWER))) == (False, [])
    response, channel = Response(BEGUN), Channel(b"1")
    assert _read(response, channel).texts == [b"1"]
    assert (response.cancelled, channel.told) == (False, [])


@pytest.mark.parametrize(
    ("ask", "response", "looks", "body", "status", "code"),
    [
        (_ask, Response(BEGUN), [0], {}, 503, "no_replica"),
        (_ask, Response(error=RayActorError()), [1], {}, 503, "no_replica"),
        (_ask, Response(BEGUN, pause_s=5.0), [1], {}, 503, "no_replica"),
        # Serve would hold the call; a whole answer has no limit that would end the wait.
        (_ask, Response(BEGUN, pause_s=5.0), [1, 1, 0], WHOLE, 503, "no_replica"),
        (_ask, Response(BEGUN, pause_s=HOUR_S), [1], WHOLE, 504, "answer-timeout"),
        (
            _ask,
            Response(BEGUN, pause_s=HOUR_S),
            [1],
            {"use_beam_search": True},
            504,
            "answer-timeout",
        ),
        (_time, Response(TIMING), [0], {}, 503, "no_replica"),
        (_time, Response(error=RayActorError()), [1], {}, 503, "no_replica"),
        (_time, Response(TIMING, pause_s=HOUR_S), [1, 0], {}, 503, "no_replica"),
        (_time, Response(TIMING, pause_s=HOUR_S), [1], {}, 504, "prefill-timeout"),
    ],
)
def test_nothing_is_waited_for_in_vain(  # noqa: PLR0913, PLR0917  (a table)
    live: list[int | None],
    ask: Callable[..., Any],
    response: Response,
    looks: list[int | None],
    body: dict[str, object],
    status: int,
    code: str,
) -> None:
    """No replica, one that dies first, the last one gone and one that hangs: refused, and why."""
    live[:] = looks
    with pytest.raises(RequestRefused) as refused:
        ask(response, max_tokens=0, **body)
    refusal = refused.value.refusal
    assert (refusal.status, refusal.code) == (status, code)
    assert refusal.retry_after_s
    assert response.cancelled or looks == [0]


@pytest.mark.usefixtures("live")
def test_a_bug_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        _ask(Response(error=ZeroDivisionError()))


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize(
    ("response", "channel", "error"),
    [
        (Response(BEGUN), Channel(b"1", b"2"), type(None)),
        (Response(BEGUN), Channel(b"1", b"2", pause_s=1.0), type(None)),  # its call ended first
        (Response(BEGUN, stands_s=HOUR_S), Channel(b"1", b"2", end="broken"), EngineFailed),
        (Response(BEGUN, stands_s=HOUR_S), Channel(b"1", b"2", end="lost"), ChannelLostError),
        (Response(BEGUN, error=RayActorError()), Channel(b"1", b"2", end=None), RayActorError),
        (Response(BEGUN), Channel(b"1", b"2", end=None), EngineFailed),
    ],
    ids=["whole", "late", "broken", "lost", "a death midway", "no end"],
)
def test_how_a_stream_ends(response: Response, channel: Channel, error: type) -> None:
    """Its events come, and one end: with the usage, or with what broke it off."""
    collected = _read(response, channel)
    assert collected.texts == [b"1", b"2"]
    assert collected.end is not None
    assert isinstance(collected.end.error, error)
    if error is type(None):
        assert (collected.end.text, collected.end.usage) == ("[DONE]", {"completion_tokens": 2})


@pytest.mark.usefixtures("live")
def test_a_stream_whose_engine_stands_still_midway_ends() -> None:
    """Each event may take half a minute, however many came before and however long the answer."""
    response = Response(BEGUN, stands_s=HOUR_S)
    collected = _read(response, Channel(b"1", b"2", end=None, pause_s=3.0))
    assert collected.end is not None
    assert isinstance(collected.end.error, RequestRefused)
    assert collected.end.error.refusal.code == "token-timeout"
    assert response.cancelled
    many = [b"%d" % number for number in range(99)]
    paced = _read(Response(BEGUN, stands_s=HOUR_S), Channel(*many, pause_s=29.0))
    assert (paced.texts, paced.end and paced.end.error) == (many, None)


@pytest.mark.usefixtures("live")
def test_a_client_that_reads_slowly_is_not_late() -> None:
    channel = Channel(b"1", pause_s=HOUR_S)
    read = _read(Response(BEGUN, stands_s=2 * HOUR_S), channel, holds_s=HOUR_S)
    assert (read.texts, channel.told) == ([b"1"], [Kind.HOLD, Kind.GO_ON])


@pytest.mark.usefixtures("live")
def test_a_prompt_is_timed() -> None:
    """The replica's answer comes through, whatever it is, and the call is left alone."""
    for answer in (TIMING, Refusal(status=400, message="No such prompt.")):
        response = Response(answer)
        assert _time(response) == answer
        assert not response.cancelled


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
    body: dict[str, object], param: str
) -> None:
    """It is refused with its parameter; vLLM would answer without the times."""
    refusal = _time(Response(error=ZeroDivisionError()), **body)
    assert (refusal.status, refusal.param) == (400, param)
    assert param in refusal.message


def _answered(decode: Any, prefill: Any, body: dict[str, Any], config: EndpointConfig) -> Any:  # noqa: ANN401
    """Return how a completion of one decode and one prefill pool begins."""

    async def ask() -> Any:  # noqa: ANN401
        servers = _backend({"d0": decode}, {"d0": prefill}, config=config)
        answer = await servers.answer("d0", "completions", body)
        return answer if isinstance(answer, Refusal) else answer.chunk

    return run(ask())


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize(
    ("body", "counted", "place"),
    [
        ({"prompt": "x"}, 9, None),
        ({"prompt": "x"}, 8, "short"),
        ({"prompt": "x"}, None, None),  # it does not count what it refuses; prefill says why
        ({"prompt": [1] * 8}, 8, "short"),
        # Too long to be counted.
        ({"prompt": [1] * 9, "n": 1, "logprobs": 2}, 8, None),
        ({"prompt": "a" * 1000}, 8, None),
        ({"messages": [{"content": "a" * 1000}]}, 8, None),
        ({"prompt": "x", "n": None, "echo": False, "prompt_logprobs": None}, 9, None),
        ({"prompt": "x", "n": 2}, 9, "n"),
        ({"prompt": ["a", "b"]}, 9, "prompt-list"),
        ({"prompt": "x", "use_beam_search": True}, 9, "beam-search"),
        ({"prompt": "x", "prompt_logprobs": 0}, 9, "prompt-logprobs"),
        ({"messages": [], "echo": True}, 9, "echo"),
    ],
)
def test_a_prompt_goes_where_it_belongs(
    body: dict[str, Any], counted: int | None, place: str | None
) -> None:
    """
    Decode is told what prefill returned, or why it computes the prompt itself.

    One fetched KV cache gives neither several answers nor what looks at the prompt.
    """
    config = replace(CONFIG, routing=Routing(local_threshold_tokens=8))
    decode, prefill = _handle(Response(WHOLE_ANSWER), counted), _handle()
    assert _answered(decode, prefill, body, config) == WHOLE_ANSWER
    *_, said = decode.given[-1]
    if place is None:
        assert (prefill.given, said.prefilled) == ([("completions", body)], PREFILLED)
    else:
        assert (prefill.given, said) == ([], LocalPrefill(reason=place))


@pytest.mark.usefixtures("live")
def test_what_prefill_refuses_is_not_decoded() -> None:
    refusal = Refusal(status=400, message="No such prompt.")
    decode, prefill = _handle(Response(BEGUN)), _handle(Response(refusal))
    assert _answered(decode, prefill, {"prompt": "x"}, CONFIG) == refusal
    assert decode.given == []


@pytest.mark.usefixtures("live")
def test_the_time_of_prefill_is_no_longer_there_for_the_first_token() -> None:
    decode = _handle(Response(BEGUN, pause_s=3.8))
    prefill = _handle(Response(PREFILLED, pause_s=0.5))
    with pytest.raises(RequestRefused):
        _answered(decode, prefill, {"prompt": "x", "stream": True}, CONFIG)


@pytest.mark.parametrize("left", [0, 1])
def test_a_prefill_call_is_cancelled_with_its_wait(live: list[int | None], left: int) -> None:
    """Whether no replica is left or the deadline passed, Serve must not go on with it."""
    live[:] = [left]
    response = Response("late", pause_s=5.0)

    async def give_up() -> None:
        async with asyncio.timeout(1.0):
            await PrefillHandles({"d0": _handle(response)}).call("d0", "chat", {}, [])

    with pytest.raises(TimeoutError if left else NoReplica):
        run(give_up())
    assert response.cancelled


def test_limits_are_the_plans(plan: Plan) -> None:
    """
    Deadlines are twice the SLO's TTFT, and a first token has 2 s beyond both of them.

    A token has ten times the pace of the SLO; without a plan a second.
    """
    tight = plan.under(slo=SloSpec(ttft_s=0.5, tpot_s=0.05))
    config = endpoint_config(plan.deployment, domains={"laptop": "d0"}, plan=tight)
    assert (config.prefill_deadline_s, first_token_limit_s(config)) == (1.0, 4.0)
    # An event may take as long as a first one, for a sequence that is preempted; at least 30 s.
    long = replace(config, prefill_deadline_s=40.0, kv_wait_deadline_s=40.0)
    assert [event_limit_s(each) for each in (config, long)] == [30.0, 82.0]
    without = endpoint_config(plan.deployment, domains={"laptop": "d0"})
    one = {"max_tokens": 10}
    for kind, body, tokens in (
        ("chat", {"messages": []}, 2048),
        ("chat", {"messages": [], "max_tokens": 0}, 0),
        ("completions", {"prompt": "x"}, 16),
        # Of sixteen sequences at once; beam search has the same time.
        ("completions", {"prompt": "x", "n": 16} | one, 10),
        ("completions", {"prompt": "x", "n": 17} | one, 20),
        ("completions", {"prompt": ["x"] * 11, "n": 3} | one, 30),
        ("completions", {"prompt": "x", "use_beam_search": True} | one, 10),
    ):
        for limits, token_s in ((config, 0.5), (without, 1.0)):
            expected_s = first_token_limit_s(limits) + tokens * token_s
            assert whole_answer_limit_s(limits, kind, body) == pytest.approx(expected_s), body


def test_replicas_that_can_be_called_are_counted_without_the_controller(
    live: list[int | None],
) -> None:
    """The handles know them, also while Serve's controller restarts; a handle may need a moment."""

    async def running() -> dict[tuple[str, str], int]:
        return await _backend({"d0": _handle()}, {"d0": _handle()}).running()

    live[:] = [None, None, 2]
    assert run(running()) == {("decode", "d0"): 2, ("prefill", "d0"): 2}
    live[:] = [None]
    with pytest.raises(TimeoutError):
        run(running())
