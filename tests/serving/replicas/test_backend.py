"""Replicas behind the endpoint: calls, places, cancellations, refusals and time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from minicluster.plan import Plan, Routing
from minicluster.specs.slo import SloSpec
from serving.deployment.compile import endpoint_config
from serving.protocol.messages import (
    AnswerEnd,
    EndpointConfig,
    EngineFailed,
    FirstChunk,
    Kind,
    Prefilled,
    PrefillTiming,
    PromptPath,
    Refusal,
    RequestPhases,
    RequestRefused,
)
from serving.replicas.backend import (
    ReplicaBackend,
    event_limit_s,
    first_token_limit_s,
    whole_answer_limit_s,
)
from serving.replicas.channels import ChannelLostError
from serving.replicas.seats import NoReplicaError, RoutedPrompt, Seat
from tests.serving.configs import ONGOING, unplanned
from tests.serving.virtual_time import run

CONFIG = unplanned(prefill_deadline_s=1.0, kv_wait_deadline_s=1.0, max_model_len=60, max_num_seqs=1)
"""A first token has 4 s, each token asked for 1 s beyond."""

PREFILLED = Prefilled(kv_transfer_params={}, replica="p0", queue_s=0.0, step_s=0.1)
TIMING = PrefillTiming(prompt_tokens=3, seconds=0.1, queue_s=0.0, step_s=0.1)
PHASES = RequestPhases(prefill_s=0.0, decode_s=0.0)
BEGUN = FirstChunk(phases=PHASES, first="0")
WHOLE_ANSWER = FirstChunk(phases=PHASES, first={})

WHOLE, HOUR_S = {"stream": False}, 3600.0
ANSWER, PREFILL = ("decode", "d0"), ("prefill", "d0")
LOST = ChannelLostError("cut")


class FakeCall:
    """A call of a replica: its result, or an error, after a pause; then events and an end."""

    def __init__(
        self,
        result: object,
        *texts: bytes,
        pause_s: float = 0.0,
        end: str = "done",
        event_s: float = 0.0,
        end_s: float = 0.0,
    ) -> None:
        self._result, self._texts, self._end = result, texts, end
        self._pauses_s = pause_s, event_s, end_s
        self.streams = result is BEGUN
        self.cancelled = False
        self.told: list[Kind] = []

    def begin(self) -> FakeCall:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work = asyncio.create_task(self._begin())
        return self

    async def _begin(self) -> None:
        await asyncio.sleep(self._pauses_s[0])
        if isinstance(self._result, Exception):
            self.result.set_exception(self._result)
        else:
            self.result.set_result(self._result)

    def forward(self, reader: Any) -> None:  # noqa: ANN401
        self._work = asyncio.create_task(self._send(reader))

    async def _send(self, reader: Any) -> None:  # noqa: ANN401
        for text in self._texts:
            await asyncio.sleep(self._pauses_s[1])
            reader.events(text)
        await asyncio.sleep(self._pauses_s[2])
        if self._end == "lost":
            reader.lost(LOST)
        elif self._end == "broken":
            reader.ended({"error": "broken"})
        else:
            usage = {"completion_tokens": 2}
            reader.ended({"usage": usage, "text": "[DONE]", "error": ""})

    def tell(self, kind: Kind) -> None:
        self.told.append(kind)

    def cancel(self) -> None:
        assert not self.cancelled
        self.cancelled = True
        self._work.cancel()
        self.result.cancel()


class Replicas:
    """
    Implements `Seats` with one replica in each pool, whose calls do as they are told.

    Attributes:
        calls: by method, or what makes them; an exception is raised instead.
        known: what `live` returns, one at each look; the last stays.
        given: method and arguments of each call.
        prompts: the last for which there was a place, by pool.
        taken: places that have not been given back.
    """

    def __init__(
        self, *known: list[str] | None, gone: str = "", wait_s: float = 0.0, **calls: object
    ) -> None:
        self.calls = {"prefill": FakeCall(PREFILLED)} | calls
        self.known = [*known] or [["r0"]]
        self.given: list[tuple[str, dict[str, Any]]] = []
        self.prompts: dict[tuple[str, str], RoutedPrompt] = {}
        self.taken: set[tuple[tuple[str, str], Seat]] = set()
        self.answered: list[str] = []
        self._gone, self._wait_s = gone, wait_s
        self._seats = 0

    async def seat(self, pool: tuple[str, str], prompt: RoutedPrompt, tried: Sequence[str]) -> Seat:
        assert isinstance(tried, list)
        if self.known[0] == [] or pool[0] == self._gone:
            raise NoReplicaError
        await asyncio.sleep(self._wait_s)
        self.prompts[pool] = prompt
        self._seats += 1
        seat = Seat(f"{pool[0][0]}0", self._seats)
        self.taken.add((pool, seat))
        return seat

    def leave(self, pool: tuple[str, str], seat: Seat, *, answered: bool = False) -> None:
        self.taken.remove((pool, seat))
        self.answered += [seat.replica] * answered

    async def answered_within(self, _pool: tuple[str, str], replica: str, _age_s: float) -> bool:
        return replica in self.answered

    def live(self, _pool: tuple[str, str]) -> Sequence[str] | None:
        return self.known.pop(0) if len(self.known) > 1 else self.known[0]

    def call(self, replica: str, method: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401
        self.given.append((method, arguments))
        call = self.calls[method]
        if isinstance(call, Exception):
            raise call
        call = call() if callable(call) else call
        assert isinstance(call, FakeCall), replica
        return call.begin()


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


async def _begun(replicas: Replicas, **body: object) -> Any:  # noqa: ANN401
    """Return how the answer of a chat begins; one in one piece has given its place back."""
    try:
        answer = await ReplicaBackend(CONFIG, replicas).answer(
            "d0", "chat", {"stream": True, **body}
        )
    except RequestRefused:
        assert not replicas.taken
        raise
    found = answer if isinstance(answer, Refusal) else answer.chunk
    assert len(replicas.taken) == (found is BEGUN)
    return found


def _ask(call: object, replicas: Replicas, **body: object) -> Any:  # noqa: ANN401
    replicas.calls["answer"] = call
    return run(_begun(replicas, **body))


def _time(call: object, replicas: Replicas, **body: object) -> Any:  # noqa: ANN401
    replicas.calls["time_prefill"] = call
    backend = ReplicaBackend(CONFIG, replicas)
    try:
        return run(backend.time_prefill({"prompt": [1, 2, 3], **body}))
    finally:
        assert not replicas.taken


def _read(call: FakeCall, *, holds_s: float = 0.0) -> Collected:
    """Return what a stream brings; its client stands still for *holds_s* after the first event."""

    async def read() -> Collected:
        replicas = Replicas(answer=call)
        answer = await ReplicaBackend(CONFIG, replicas).answer("d0", "chat", {"stream": True})
        assert not isinstance(answer, Refusal)
        collected = Collected()
        answer.forward(collected)
        if holds_s:
            answer.hold(on=True)
            await asyncio.sleep(holds_s)
            answer.hold(on=False)
        await collected.over.wait()
        assert not replicas.taken
        answer.close()
        return collected

    return run(read())


@pytest.mark.parametrize("known", [None, ["d0"]])
def test_how_an_answer_begins(known: list[str] | None) -> None:
    """One in one piece may take longer; replicas may be not yet known."""
    slow = FakeCall(WHOLE_ANSWER, pause_s=5.0)
    assert (_ask(slow, Replicas(known), **WHOLE), slow.cancelled) == (WHOLE_ANSWER, False)
    begun = FakeCall(BEGUN)
    assert (_ask(begun, Replicas(known)), begun.cancelled) == (BEGUN, False)
    refusal = Refusal(status=400, message="No such prompt.")
    assert _ask(FakeCall(refusal), Replicas(known)) == refusal


def test_an_answer_that_is_not_read_is_cancelled() -> None:
    """One that has ended, or came in one piece, is not; its place is given back once."""

    async def closed(call: FakeCall) -> bool:
        replicas = Replicas(answer=call)
        answer = await ReplicaBackend(CONFIG, replicas).answer("d0", "chat", {"stream": True})
        assert not isinstance(answer, Refusal)
        answer.close()
        answer.close()
        assert not replicas.taken
        return call.cancelled

    assert run(closed(FakeCall(BEGUN)))
    assert not run(closed(FakeCall(WHOLE_ANSWER)))
    call = FakeCall(BEGUN, b"1")
    assert (_read(call).texts, call.cancelled, call.told) == ([b"1"], False, [])


@pytest.mark.parametrize("method", ["prefill", "answer"])
def test_a_request_that_is_cancelled_ends_its_call(method: str) -> None:
    call = FakeCall(PREFILLED, pause_s=HOUR_S)

    async def leave() -> None:
        replicas = Replicas()
        replicas.calls[method] = call
        asking = asyncio.create_task(_begun(replicas))
        await asyncio.sleep(0.3)
        assert len(replicas.taken) == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.1)
        assert not replicas.taken

    run(leave())
    assert call.cancelled


@pytest.mark.parametrize(
    ("ask", "call", "replicas", "body", "status", "code"),
    [
        (_ask, FakeCall(BEGUN), Replicas([]), {}, 503, "no_replica"),
        (_ask, FakeCall(BEGUN), Replicas(gone="decode"), WHOLE, 503, "no_replica"),
        (_ask, FakeCall(LOST), Replicas(), {}, 503, "no_replica"),
        (_ask, LOST, Replicas(), {}, 503, "no_replica"),
        (_ask, FakeCall(BEGUN, pause_s=5.0), Replicas(), {}, 503, "no_replica"),
        (_ask, FakeCall(WHOLE_ANSWER, pause_s=HOUR_S), Replicas(), WHOLE, 504, "answer-timeout"),
        (
            _ask,
            FakeCall(WHOLE_ANSWER, pause_s=HOUR_S),
            Replicas(),
            {"use_beam_search": True},
            504,
            "answer-timeout",
        ),
        (_time, FakeCall(TIMING), Replicas([]), {}, 503, "no_replica"),
        (_time, FakeCall(LOST), Replicas(), {}, 503, "no_replica"),
        (_time, FakeCall(TIMING), Replicas(wait_s=HOUR_S), {}, 504, "prefill-timeout"),
        (_time, FakeCall(TIMING, pause_s=HOUR_S), Replicas(), {}, 504, "prefill-timeout"),
    ],
)
def test_nothing_is_waited_for_in_vain(
    ask: Callable[..., Any],
    call: object,
    replicas: Replicas,
    body: dict[str, object],
    status: int,
    code: str,
) -> None:
    """No replica, one that is lost, the last one gone, no place and one that hangs: refused."""
    with pytest.raises(RequestRefused) as refused:
        ask(call, replicas, max_tokens=0, **body)
    refusal = refused.value.refusal
    assert (refusal.status, refusal.code) == (status, code)
    assert refusal.retry_after_s
    begun = isinstance(call, FakeCall) and hasattr(call, "result")
    assert not begun or (isinstance(call, FakeCall) and call.cancelled)


@pytest.mark.parametrize("error", [ZeroDivisionError(), EngineFailed("it is dead")])
def test_an_error_of_the_call_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)):
        _ask(FakeCall(error), Replicas())


@pytest.mark.parametrize(
    ("end", "error"),
    [("done", type(None)), ("broken", EngineFailed), ("lost", ChannelLostError)],
)
def test_how_a_stream_ends(end: str, error: type) -> None:
    """Its events come, and one end: with the usage, or with what broke it off."""
    collected = _read(FakeCall(BEGUN, b"1", b"2", end=end))
    assert collected.texts == [b"1", b"2"]
    assert collected.end is not None
    assert isinstance(collected.end.error, error)
    if error is type(None):
        assert (collected.end.text, collected.end.usage) == ("[DONE]", {"completion_tokens": 2})


def test_a_stream_whose_engine_stands_still_midway_ends() -> None:
    """Each event may take half a minute, however many came before and however long the answer."""
    call = FakeCall(BEGUN, b"1", b"2", event_s=3.0, end_s=HOUR_S)
    collected = _read(call)
    assert collected.end is not None
    assert isinstance(collected.end.error, RequestRefused)
    assert collected.end.error.refusal.code == "token-timeout"
    assert (collected.texts, call.cancelled) == ([b"1", b"2"], True)
    many = [b"%d" % number for number in range(99)]
    paced = _read(FakeCall(BEGUN, *many, event_s=29.0))
    assert (paced.texts, paced.end and paced.end.error) == (many, None)


def test_a_client_that_reads_slowly_is_not_late() -> None:
    call = FakeCall(BEGUN, b"1", event_s=HOUR_S)
    assert _read(call, holds_s=HOUR_S).texts == [b"1"]
    assert call.told == [Kind.HOLD, Kind.GO_ON]


def test_a_prompt_is_timed() -> None:
    """The replica's answer comes through, whatever it is, and the call is left alone."""
    for answer in (TIMING, Refusal(status=400, message="No such prompt.")):
        call = FakeCall(answer)
        assert _time(call, Replicas()) == answer
        assert not call.cancelled


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
    refusal = _time(ZeroDivisionError(), Replicas(), **body)
    assert (refusal.status, refusal.param) == (400, param)
    assert param in refusal.message


def _answered(replicas: Replicas, body: dict[str, Any], config: EndpointConfig) -> Any:  # noqa: ANN401
    """Return how a completion begins."""

    async def ask() -> Any:  # noqa: ANN401
        answer = await ReplicaBackend(config, replicas).answer("d0", "completions", body)
        return answer if isinstance(answer, Refusal) else answer.chunk

    return run(ask())


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
    replicas = Replicas(answer=FakeCall(WHOLE_ANSWER), prompt_tokens=FakeCall(counted))
    assert _answered(replicas, body, config) == WHOLE_ANSWER
    *_, (method, asked) = replicas.given
    prefilled = [arguments for name, arguments in replicas.given if name == "prefill"]
    assert (method, asked["kind"], asked["body"]) == ("answer", "completions", body)
    if place is None:
        assert prefilled == [{"kind": "completions", "body": body}]
        assert asked["prefill"].prefilled == PREFILLED
    else:
        assert (prefilled, asked["prefill"]) == ([], PromptPath(reason=place))


def test_what_prefill_refuses_is_not_decoded() -> None:
    refusal = Refusal(status=400, message="No such prompt.")
    replicas = Replicas(prefill=FakeCall(refusal))
    assert _answered(replicas, {"prompt": "x"}, CONFIG) == refusal
    assert [method for method, _ in replicas.given] == ["prefill"]


def test_the_time_of_prefill_is_no_longer_there_for_the_first_token() -> None:
    answer, prefill = FakeCall(BEGUN, pause_s=3.8), FakeCall(PREFILLED, pause_s=0.5)
    with pytest.raises(RequestRefused):
        _answered(Replicas(answer=answer, prefill=prefill), {"prompt": "x", "stream": True}, CONFIG)


def test_each_pool_sees_the_prompt_by_its_own_policy() -> None:
    prefill, decode = CONFIG.pools
    config = replace(CONFIG, pools=(replace(prefill, policy="prefix-aware"), decode))
    replicas = Replicas(answer=FakeCall(WHOLE_ANSWER))
    _answered(replicas, {"prompt": [1] * 1000}, config)
    assert (replicas.prompts[PREFILL].tokens, replicas.prompts[ANSWER]) == (1000, (1000, ()))
    assert replicas.prompts[PREFILL].blocks


def test_a_replica_that_is_tried_is_noted_and_one_that_answers_as_well() -> None:
    """A call of prefill that is given up is cancelled, and nothing goes on with it."""

    async def called() -> None:
        replicas, tried = Replicas(), list[str]()
        backend = ReplicaBackend(CONFIG, replicas)
        await asyncio.sleep(7.0)
        assert await backend.call("d0", "chat", {}, tried) == PREFILLED
        assert (tried, replicas.taken) == (["p0"], set())
        assert replicas.answered == ["p0"]
        assert await backend.answered_within("d0", "p0", 1.0)
        replicas.calls["prefill"] = slow = FakeCall(PREFILLED, pause_s=5.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(backend.call("d0", "chat", {}, tried), 1.0)
        assert (slow.cancelled, tried, replicas.taken) == (True, ["p0", "p0"], set())
        assert replicas.answered == ["p0"]

    run(called())


def test_limits_are_the_plans(plan: Plan) -> None:
    """
    Deadlines are twice the SLO's TTFT, and a first token has 2 s beyond both of them.

    A token has ten times the pace of the SLO; without a plan a second.
    """
    tight = plan.under(slo=SloSpec(ttft_s=0.5, tpot_s=0.05))
    config = endpoint_config(plan.deployment, domains={"laptop": "d0"}, ongoing=ONGOING, plan=tight)
    assert (config.prefill_deadline_s, first_token_limit_s(config)) == (1.0, 4.0)
    # An event may take as long as a first one, for a sequence that is preempted; at least 30 s.
    long = replace(config, prefill_deadline_s=40.0, kv_wait_deadline_s=40.0)
    assert [event_limit_s(each) for each in (config, long)] == [30.0, 82.0]
    without = endpoint_config(plan.deployment, domains={"laptop": "d0"}, ongoing=ONGOING)
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


def test_replicas_that_can_be_called_are_counted_without_the_controller() -> None:
    """They are known also while Serve's controller restarts; it may need a moment at first."""

    async def running(*known: list[str] | None) -> dict[tuple[str, str], int]:
        return await ReplicaBackend(CONFIG, Replicas(*known)).running()

    assert run(running(None, None, ["a", "b"])) == {ANSWER: 2, PREFILL: 2}
    assert run(running([])) == {ANSWER: 0, PREFILL: 0}
    with pytest.raises(TimeoutError):
        run(running(None))


@pytest.mark.parametrize("known", [["r0", "r1"], []])
def test_one_engine_of_each_pool_says_what_it_is(known: list[str]) -> None:
    """Without what is nobody's business; one that does not answer holds up no other."""

    async def asked(facts: object, steps: object) -> Any:  # noqa: ANN401
        backend = ReplicaBackend(CONFIG, Replicas(known, facts=facts, steps=steps))
        return await backend.facts(), await backend.steps(1.0, 2.0)

    said = {"tp": 2, "dtype": "bfloat16", "host": "secret"}
    facts, steps = run(asked(lambda: FakeCall(said), lambda: FakeCall([[1.5, 0.1]])))
    each = {"tp": 2, "dtype": "bfloat16"}
    assert facts == ({ANSWER: each, PREFILL: each} if known else {})
    assert steps == ({"prefill": [[1.5, 0.1]], "decode": [[1.5, 0.1]]} if known else {})
    slow, lost = (lambda: FakeCall({}, pause_s=HOUR_S)), (lambda: FakeCall(LOST))
    assert run(asked(slow, lost)) == ({}, {})
