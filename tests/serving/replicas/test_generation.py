"""What becomes of an engine's answer, and of its failures: with an engine of the test."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from serving.protocol.messages import (
    DIED,
    TIMEOUT,
    EngineFailed,
    FirstChunk,
    Prefilled,
    PromptPath,
    Refusal,
    to_json,
)
from tests.serving.configs import unplanned
from tests.serving.virtual_time import run

DONE = "data: [DONE]\n\n"
ONE = "data: 1\n\n"
USAGE = 'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
FAILED = 'data: {"error":{"message":"KeyError in scheduler.py","code":500,"param":null}}\n\n'
PREFILLED = Prefilled(kv_transfer_params={"at": "p0"}, replica="p0", queue_s=0.1, step_s=0.2)
REMOTE = PromptPath(path="remote", prefilled=PREFILLED, seconds=0.5)
CONFIG = unplanned(prefill_deadline_s=600.0, kv_wait_deadline_s=10.0)
STREAM = {"prompt": "x", "stream": True}
DEAD = "the engine is dead"


class Engine:
    """Yields what it is given; exceptions it raises, and at a `None` it takes 11 s."""

    _engine_client = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    )

    def __init__(self, *items: object) -> None:
        self._items = items
        self.asked: Any = None
        self.ended = False

    async def completions(self, request: Any, _info: object) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        self.asked = request
        try:
            for item in self._items:
                if item is None:
                    await asyncio.sleep(11.0)
                elif item == DEAD:
                    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

                    raise EngineDeadError
                else:
                    yield item
        finally:
            self.ended = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Return what makes a server with an engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports warn of themselves
        from serving.replicas import roles, vllm  # noqa: PLC0415
    here = SimpleNamespace(replica_id=SimpleNamespace(unique_id="d0"))
    monkeypatch.setattr(roles, "serve", SimpleNamespace(get_replica_context=lambda: here))
    monkeypatch.setattr(vllm.VllmAnswers, "first_token_seen", lambda *_: False)

    def serving(engine: Engine) -> Any:  # noqa: ANN401
        made = roles.AnswerRole()
        made.answers = vllm.VllmAnswers(SimpleNamespace(engine=engine))
        made._config, made._closing = CONFIG, {}
        return made

    return serving


@pytest.fixture
def ask(server: Any) -> Any:  # noqa: ANN401
    """Return what asks a server with an engine that yields *items*."""

    def asking(body: dict[str, Any], *items: object, prefill: PromptPath = REMOTE) -> Any:  # noqa: ANN401
        engine = Engine(*items)
        made = server(engine)

        async def all_of_it() -> list[Any]:
            said = []
            try:
                async for item in made.events("completions", body, prefill):
                    said.append(item)  # noqa: PERF401  (what came before an error counts)
            except Exception as error:  # noqa: BLE001  (what the caller would see)
                said.append(error)
            await asyncio.gather(*made._closing)
            return said

        return run(all_of_it()), engine

    return asking


class Call:
    """What a caller gets of an answer; it takes nothing for a minute after each event."""

    must_wait = True

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []

    def begin(self, chunk: FirstChunk) -> None:
        self.got.append(("begun", chunk.first))

    def events(self, text: bytes) -> None:
        self.got.append(("events", text.decode()))

    def end(self, **ending: object) -> None:
        self.got.append(("end", ending))

    async def room(self) -> None:
        await asyncio.sleep(60.0)


@pytest.mark.parametrize("leaves", [False, True])
def test_the_events_of_a_stream_go_to_its_call(server: Any, *, leaves: bool) -> None:  # noqa: ANN401
    """As fast as it takes them; nothing is left behind when it is cancelled."""
    engine = Engine(ONE, None, "data: 2\n\n", USAGE, DONE)
    made = server(engine)

    async def asked() -> tuple[list[Any], float]:
        call = Call()
        answering = asyncio.create_task(
            made.answer(call, "completions", STREAM, json.loads(to_json(REMOTE)))
        )
        await asyncio.sleep(5.0)
        if leaves:
            answering.cancel()
        await asyncio.wait({answering})
        assert leaves or answering.result() is None
        await asyncio.gather(*made._closing)
        return call.got, asyncio.get_running_loop().time()

    (begun, *rest), ended_s = run(asked())
    assert (begun, engine.ended) == (("begun", ONE), True)
    ending = {"usage": {"completion_tokens": 2}, "text": DONE}
    events = [("events", "data: 2\n\n"), ("events", ""), ("events", ""), ("end", ending)]
    assert rest == ([] if leaves else events)
    assert ended_s == (5.0 if leaves else 11.0 + 3 * 60.0)
    assert engine.asked.stream_options.include_usage
    assert engine.asked.kv_transfer_params == {"at": "p0"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "x", "temperature": "hot"}, Refusal),
        ({"prompt": "x", "stream": False}, FirstChunk),
    ],
)
def test_what_is_no_stream_is_the_result_of_its_call(
    server: Any,  # noqa: ANN401
    body: dict[str, Any],
    said: type,
) -> None:
    """A refusal, or the whole answer with its phases."""
    answer = SimpleNamespace(usage=None, model_dump=lambda: {"choices": []})
    call, made = Call(), server(Engine(answer))
    result = run(made.answer(call, "completions", body, json.loads(to_json(REMOTE))))
    assert (type(result), call.got) == (said, [])


def test_a_stream_passes_and_says_its_path(ask: Any) -> None:  # noqa: ANN401
    """The phases come with the first event; decode is told where the KV cache is."""
    (begun, *events), engine = ask(STREAM, ONE, "data: 2\n\n", DONE)
    phases, first = begun
    assert (phases.path, phases.prefill_replica, phases.decode_replica) == ("remote", "p0", "d0")
    assert (phases.prefill_s, phases.prefill_queue_s, phases.prefill_step_s) == (0.5, 0.1, 0.2)
    assert phases.headers == {
        "X-Minicluster-Path": "remote",
        "Server-Timing": "prefill_queue;dur=100.0, prefill;dur=200.0, handoff;dur=0.0",
    }
    assert [first, *events] == [[ONE], ["data: 2\n\n"], [DONE]]
    assert engine.asked.kv_transfer_params == {"at": "p0"}


@pytest.mark.parametrize(
    ("prefill", "items", "said"),
    [
        # Without prefill elsewhere the first token may take as long as both phases together.
        (PromptPath(reason="echo"), (None, ONE, DONE), "local; reason=echo"),
        (
            PromptPath(path="fallback-local", reason=DIED, seconds=3.0),
            (ONE, DONE),
            "fallback-local; reason=prefill-failed",
        ),
        (
            replace(REMOTE, path="retried", reason=DIED),
            (ONE, DONE),
            "retried; reason=prefill-failed",
        ),
    ],
)
def test_what_became_of_prefill_is_said(ask: Any, prefill: Any, items: Any, said: str) -> None:  # noqa: ANN401
    (begun, *_), engine = ask(STREAM, *items, prefill=prefill)
    phases, _ = begun
    assert (phases.path_and_reason, phases.prefill_s) == (said, prefill.seconds)
    remote = prefill.prefilled is not None
    assert phases.prefill_replica == ("p0" if remote else "")
    # Of a prompt that decode computes queue and prefill are one sum, and nothing is handed over.
    parts = (
        "prefill_queue, prefill, handoff"
        if remote
        else "queued_prefill, kv_fetch, first_decode_step"
    )
    assert re.sub(r";dur=[0-9.]+", "", phases.headers["Server-Timing"]) == parts
    assert phases.headers["X-Minicluster-Path"] == said
    assert (getattr(engine.asked, "kv_transfer_params", None) is not None) == remote


def test_prefill_that_was_given_up_leaves_less_time_for_the_first_token(ask: Any) -> None:  # noqa: ANN401
    """The engine takes 11 s here, and 10 s are left of both deadlines."""
    late = PromptPath(path="fallback-local", reason=TIMEOUT, seconds=600.0)
    [refusal], _ = ask(STREAM, None, ONE, DONE, prefill=late)
    assert (refusal.status, refusal.code) == (504, "kv-wait-timeout")


@pytest.mark.parametrize(("items", "named"), [((FAILED, DONE), b""), ((DEAD,), b"The engine died")])
def test_an_engine_that_fails_midway_is_never_done(ask: Any, items: Any, named: bytes) -> None:  # noqa: ANN401
    """What breaks a stream can be read without vLLM, which the endpoint must not import."""
    (begun, error), engine = ask(STREAM, ONE, *items)
    assert (begun[1], type(error), engine.ended) == ([ONE], EngineFailed, True)
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer), 'vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", read], input=pickle.dumps(error), capture_output=True, check=True
    )
    assert done.stdout.startswith(named)
    assert done.stdout.split()[-1] == b"False"


@pytest.mark.parametrize(
    ("body", "items", "status", "code"),
    [
        (STREAM, (FAILED, DONE), 500, None),
        (STREAM, (DEAD,), 503, "engine-died"),
        # At the KV-wait deadline; the engine is let go when the token is there.
        (STREAM, (None, ONE), 504, "kv-wait-timeout"),
        ({"prompt": "x", "stream": False}, (None, ONE), 504, "kv-wait-timeout"),
    ],
)
def test_an_engine_that_fails_at_once_is_a_refusal(
    ask: Any,  # noqa: ANN401
    body: dict[str, Any],
    items: tuple[Any, ...],
    status: int,
    code: str | None,
) -> None:
    """An answer with its status, without our insides; with Retry-After where that may help."""
    [refusal], engine = ask(body, *items)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (status, code)
    assert "scheduler" not in refusal.message
    assert ("Retry-After" in refusal.headers) == (status > 500)
    assert engine.ended


def test_an_engine_that_dies_in_a_whole_answer_is_a_refusal(
    ask: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although its first token was there: the client has received nothing."""
    from serving.replicas import vllm  # noqa: PLC0415

    monkeypatch.setattr(vllm.VllmAnswers, "first_token_seen", lambda *_: True)
    [refusal], engine = ask({"prompt": "x", "stream": False}, None, DEAD)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (503, "engine-died")
    assert engine.ended


def test_what_vllm_refuses(ask: Any) -> None:  # noqa: ANN401
    """A request that vLLM does not read is refused before anybody works for it."""
    [refusal], engine = ask({"prompt": "x", "temperature": "hot"})
    assert (refusal.status, refusal.param) == (400, "temperature")
    assert engine.asked is None
