"""What becomes of an engine's answer, and of its failures: with an engine of the test."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from serving.protocol.messages import EngineFailed, FirstChunk, Prefilled, Refusal
from tests.serving.configs import unplanned
from tests.serving.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

DONE = "data: [DONE]\n\n"
FAILED = 'data: {"error":{"message":"KeyError in scheduler.py","code":500,"param":null}}\n\n'
PREFILLED = Prefilled(kv_transfer_params={"at": "p0"}, replica="p0", queue_s=0.1, step_s=0.2)
CONFIG = unplanned(prefill_deadline_s=600.0, kv_wait_deadline_s=10.0)
STREAM = {"prompt": "x", "stream": True}
Ask = "Callable[..., tuple[list[Any], Engine]]"


class Engine:
    """Yields what it is given; exceptions it raises, and at a `None` it takes 11 s."""

    def __init__(self, *items: object) -> None:
        """Keep them."""
        self._items = items
        self.asked: Any = None
        self.ended = False

    async def completions(self, request: Any, _info: object) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """Do it."""
        self.asked = request
        try:
            for item in self._items:
                if item is None:
                    await asyncio.sleep(11.0)
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.ended = True


class OneReplica:
    """One prefill replica, which answers at once."""

    def live(self) -> dict[str, int]:
        """Return that it lives."""
        return {"d0": 1}

    async def call(self, _domain: str, _kind: str, request: Any, _asked: object) -> Prefilled:  # noqa: ANN401
        """Prefill."""
        assert (request.max_tokens, request.stream) == (1, False)
        return PREFILLED


@pytest.fixture(scope="module")
def module() -> Any:  # noqa: ANN401
    """Return `serving.replicas.generation`, whose imports warn of themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from serving.replicas import generation  # noqa: PLC0415
    return generation


@pytest.fixture
def ask(module: Any, monkeypatch: pytest.MonkeyPatch) -> Ask:  # noqa: ANN401
    """Return what asks a server with an engine that yields *items*."""
    here = SimpleNamespace(replica_id=SimpleNamespace(unique_id="d0"))
    monkeypatch.setattr(module, "serve", SimpleNamespace(get_replica_context=lambda: here))
    monkeypatch.setattr(module, "first_token_seen", lambda *_: False)

    def asking(body: dict[str, Any], *items: object, split: bool = True) -> Any:  # noqa: ANN401
        server = module.GenerationMixin()
        server.engine = engine = Engine(*items)
        server._config, server._closing = CONFIG, {}
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


def test_a_stream_passes_and_says_its_way(ask: Any) -> None:  # noqa: ANN401
    """The phases come with the first event; decode is told where the KV cache is."""
    (begun, *events), engine = ask(STREAM, "data: 1\n\n", "data: 2\n\n", DONE)
    assert isinstance(begun, FirstChunk)
    phases = begun.phases
    assert (phases.path, phases.prefill_replica, phases.decode_replica) == ("remote", "p0", "d0")
    assert (phases.prefill_queue_s, phases.prefill_step_s) == (0.1, 0.2)
    assert phases.headers["X-Minicluster-Path"] == "remote"
    assert [begun.first, *events] == [["data: 1\n\n"], ["data: 2\n\n"], [DONE]]
    assert engine.asked.kv_transfer_params == {"at": "p0"}


def test_an_engine_that_fails_midway_is_never_done(ask: Any) -> None:  # noqa: ANN401
    """After an error event nothing follows, [DONE] least of all."""
    (begun, error), engine = ask(STREAM, "data: 1\n\n", FAILED, DONE)
    assert begun.first == ["data: 1\n\n"]
    assert isinstance(error, EngineFailed)
    assert engine.ended


def test_no_exception_of_the_engine_leaves(ask: Any) -> None:  # noqa: ANN401
    """What breaks a stream can be read without vLLM, which the endpoint must not import."""
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    (_, error), _ = ask(STREAM, "data: 1\n\n", EngineDeadError())
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer), 'vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", read], input=pickle.dumps(error), capture_output=True, check=True
    )
    assert done.stdout.split()[0].startswith(b"EngineDeadError")
    assert done.stdout.split()[-1] == b"False"


def test_an_engine_that_fails_at_once_is_a_refusal(ask: Any) -> None:  # noqa: ANN401
    """An error as the first event is an answer with its status, without our insides."""
    [refusal], _ = ask(STREAM, FAILED, DONE)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, "scheduler" in refusal.message) == (500, False)


def test_an_engine_that_is_dead_says_come_again(ask: Any) -> None:  # noqa: ANN401
    """A request to a dead engine gets 503 with Retry-After."""
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    [refusal], _ = ask(STREAM, EngineDeadError())
    assert (refusal.status, refusal.code) == (503, "engine-died")
    assert "Retry-After" in refusal.headers


@pytest.mark.parametrize("stream", [True, False])
def test_a_first_token_that_is_late(ask: Any, *, stream: bool) -> None:  # noqa: ANN401
    """At the KV-wait deadline the client gets 504; the engine is let go when the token is there."""
    [refusal], engine = ask({"prompt": "x", "stream": stream}, None, "data: 1\n\n")
    assert (refusal.status, refusal.code) == (504, "kv-wait-timeout")
    assert engine.ended


def test_what_is_computed_here_has_both_deadlines(ask: Any) -> None:  # noqa: ANN401
    """Without prefill elsewhere the first token may take as long as both phases together."""
    (begun, *_), engine = ask({**STREAM, "echo": True}, None, "data: 1\n\n", DONE)
    phases = begun.phases
    assert (phases.path, phases.reason, phases.prefill_replica) == ("local", "echo", "")
    assert getattr(engine.asked, "kv_transfer_params", None) is None


def test_an_aggregated_server_needs_no_prefill(ask: Any) -> None:  # noqa: ANN401
    """Where no prefill pool is planned everything is local, and says so."""
    (begun, *_), _ = ask(STREAM, "data: 1\n\n", DONE, split=False)
    assert (begun.phases.path, begun.phases.reason) == ("local", "aggregated")


def test_what_vllm_refuses(ask: Any) -> None:  # noqa: ANN401
    """A request that vLLM does not read is refused before anybody works for it."""
    [refusal], engine = ask({"prompt": "x", "temperature": "hot"})
    assert (refusal.status, refusal.param) == (400, "temperature")
    assert engine.asked is None
