"""What becomes of an engine's answer, and of its failures: with an engine of the test."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.plan import Routing
from serving.protocol.messages import EngineFailed, FirstChunk, Prefilled, Refusal
from tests.serving.configs import unplanned
from tests.serving.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

DONE = "data: [DONE]\n\n"
ONE = "data: 1\n\n"
FAILED = 'data: {"error":{"message":"KeyError in scheduler.py","code":500,"param":null}}\n\n'
PREFILLED = Prefilled(kv_transfer_params={"at": "p0"}, replica="p0", queue_s=0.1, step_s=0.2)
CONFIG = unplanned(prefill_deadline_s=600.0, kv_wait_deadline_s=10.0)
STREAM = {"prompt": "x", "stream": True}
DEAD = "the engine is dead"


class Engine:
    """Yields what it is given; exceptions it raises, and at a `None` it takes 11 s."""

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


class OneReplica:
    """One prefill replica, which answers at once."""

    def live(self) -> dict[str, int]:
        return {"d0": 1}

    async def call(self, _domain: str, request: Any, _asked: object) -> Prefilled:  # noqa: ANN401
        assert (request.max_tokens, request.stream) == (1, False)
        return PREFILLED


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Return what asks a server with an engine that yields *items*."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports warn of themselves
        from serving.replicas import generation, vllm_answers  # noqa: PLC0415
    here = SimpleNamespace(replica_id=SimpleNamespace(unique_id="d0"))
    monkeypatch.setattr(generation, "serve", SimpleNamespace(get_replica_context=lambda: here))
    monkeypatch.setattr(vllm_answers, "first_token_seen", lambda *_: False)

    def asking(body: dict[str, Any], *items: object, split: bool = True, threshold: int = 0) -> Any:  # noqa: ANN401
        server = generation.GenerationMixin()
        engine = Engine(*items)
        server.answers = vllm_answers.VllmAnswers(SimpleNamespace(engine=engine))
        routing = Routing(fallback="fail", local_threshold_tokens=threshold)
        server._config, server._closing = replace(CONFIG, routing=routing), {}
        server._prefill_pool = OneReplica() if split else None

        async def all_of_it() -> list[Any]:
            said = []
            try:
                async for item in server.answer("completions", body):
                    said.append(item)  # noqa: PERF401  (what came before an error counts)
            except Exception as error:  # noqa: BLE001  (what the caller would see)
                said.append(error)
            await asyncio.gather(*server._closing)
            return said

        return run(all_of_it()), engine

    return asking


def test_a_stream_passes_and_says_its_path(ask: Any) -> None:  # noqa: ANN401
    """The phases come with the first event; decode is told where the KV cache is."""
    (begun, *events), engine = ask(STREAM, ONE, "data: 2\n\n", DONE)
    assert isinstance(begun, FirstChunk)
    phases = begun.phases
    assert (phases.path, phases.prefill_replica, phases.decode_replica) == ("remote", "p0", "d0")
    assert (phases.prefill_queue_s, phases.prefill_step_s) == (0.1, 0.2)
    assert phases.headers["X-Minicluster-Path"] == "remote"
    assert [begun.first, *events] == [[ONE], ["data: 2\n\n"], [DONE]]
    assert engine.asked.kv_transfer_params == {"at": "p0"}


@pytest.mark.parametrize(
    ("more", "items", "split", "reason"),
    [
        # Without prefill elsewhere the first token may take as long as both phases together.
        ({"echo": True}, (None, ONE, DONE), True, "echo"),
        ({}, (ONE, DONE), False, "aggregated"),
    ],
)
def test_what_is_computed_here_says_why(
    ask: Any,  # noqa: ANN401
    more: dict[str, Any],
    items: tuple[Any, ...],
    reason: str,
    *,
    split: bool,
) -> None:
    (begun, *_), engine = ask(STREAM | more, *items, split=split)
    phases = begun.phases
    assert (phases.path, phases.reason, phases.prefill_replica) == ("local", reason, "")
    assert getattr(engine.asked, "kv_transfer_params", None) is None


@pytest.mark.parametrize(("tokens", "path"), [(8, "local; reason=short"), (9, "remote")])
def test_prompts_up_to_the_threshold_are_local(ask: Any, tokens: int, path: str) -> None:  # noqa: ANN401
    (begun, *_), _ = ask(STREAM | {"prompt": [5] * tokens}, ONE, DONE, threshold=8)
    assert begun.phases.path_and_reason == path


@pytest.mark.parametrize(("items", "named"), [((FAILED, DONE), b""), ((DEAD,), b"The engine died")])
def test_an_engine_that_fails_midway_is_never_done(ask: Any, items: Any, named: bytes) -> None:  # noqa: ANN401
    """What breaks a stream can be read without vLLM, which the endpoint must not import."""
    (begun, error), engine = ask(STREAM, ONE, *items)
    assert (begun.first, type(error), engine.ended) == ([ONE], EngineFailed, True)
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
    from serving.replicas import vllm_answers  # noqa: PLC0415

    monkeypatch.setattr(vllm_answers, "first_token_seen", lambda *_: True)
    [refusal], engine = ask({"prompt": "x", "stream": False}, None, DEAD)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (503, "engine-died")
    assert engine.ended


def test_what_vllm_refuses(ask: Any) -> None:  # noqa: ANN401
    """A request that vLLM does not read is refused before anybody works for it."""
    [refusal], engine = ask({"prompt": "x", "temperature": "hot"})
    assert (refusal.status, refusal.param) == (400, "temperature")
    assert engine.asked is None
