"""The endpoint over pools that need no engine: what it lets in, passes on, counts and hides."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from minicluster.specs.slo import SloSpec
from serving.api.app import error_response
from serving.api.endpoint import ReadAhead
from serving.protocol.messages import EndpointConfig, Refusal
from tests.serving.endpoint_app import endpoint_app
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import HI, KEY, LOCKED, ONE, one, visiting
from tests.serving.request_bodies import ACCEPTED, REFUSED
from tests.serving.virtual_time import in_virtual_time

BROKEN = FakeServers(ttft_s="no time")  # type: ignore[arg-type]
"""Servers that raise TypeError."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = {"completions": COMPLETIONS, "chat": CHAT}
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in (KEY, KEY[::-1]))


def _events(answer: httpx.Response) -> list[str]:
    return [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]


def _counted(answer: httpx.Response, outcome: str, path: str = "none") -> bool:
    """Return whether the endpoint counts one request of that outcome."""
    line = f'minicluster_requests_total{{outcome="{outcome}",path="{path}"}} 1.0'
    return line in answer.extensions["metrics"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, ONE), (CHAT, HI)])
def test_answers_in_one_piece_and_in_events(
    config: EndpointConfig, path: str, body: dict[str, Any]
) -> None:
    """Both say the same, by which path, under which id; usage goes to clients that ask for it."""
    whole = one(config, path, body)
    assert (whole.status_code, whole.json()["usage"]["completion_tokens"]) == (200, 4)
    servers, streamed = FakeServers(), {**body, "stream": True}
    answer = one(config, path, streamed, servers=servers, headers={"X-Request-Id": "mine-7"})
    assert answer.headers["X-Request-Id"] == servers.seen[0]["request_id"] == "mine-7"
    assert answer.headers["X-Minicluster-Path"] == "remote"
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = _events(answer)
    assert done == "[DONE]"
    assert [bool(json.loads(chunk)["choices"]) for chunk in chunks] == [True] * 4
    assert servers.seen[0]["stream_options"] == {"include_usage": True}  # we count, they do not see
    asked = streamed | {"stream_options": {"include_usage": True}}
    *_, usage, _ = _events(one(config, path, asked))
    assert json.loads(usage)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *((given, True) for given in (b"a", b"Job_7.step-2", b"x" * 64)),
        *((given, False) for given in (b"", b"x" * 65, b"x" * 65_536, b"two words", b"\x00")),
        *((given, False) for given in (b"forged\nlevel=error", b"forged\r\nSet-Cookie: a=b")),
        *((given, False) for given in (b"\x1b[31mred", b"tab\tbed", "é".encode(), b"\xff")),
    ],
    ids=lambda given: repr(given)[:12],
)
def test_request_ids_that_cannot_forge_a_log_are_kept(
    config: EndpointConfig, given: bytes, caplog: pytest.LogCaptureFixture, *, kept: bool
) -> None:
    """Up to 64 letters, digits, dots, hyphens and underscores; answer and log repeat no others."""
    answer = one(config, COMPLETIONS, ONE, servers=BROKEN, headers={b"X-Request-Id": given})
    ours = answer.headers["X-Request-Id"]
    assert ours == given.decode() if kept else re.fullmatch(r"req-[0-9a-f]{32}", ours)
    logged = [each.getMessage() for each in caplog.records if each.name.startswith("serving")]
    assert logged == [f"request {ours} failed"]
    assert answer.status_code == 500
    assert ours in answer.json()["error"]["message"]
    assert "str" not in answer.text  # of our insides


def test_a_stream_that_breaks_ends_with_an_error_and_no_done(config: EndpointConfig) -> None:
    """Clients are told, without the engine's words; the answer does not look complete."""
    answer = one(config, COMPLETIONS, {**ONE, "stream": True}, servers=FakeServers(fails_after=2))
    *chunks, last = _events(answer)
    error = json.loads(last)["error"]
    assert (len(chunks), error["type"], error["code"]) == (2, "server_error", None)
    assert answer.headers["X-Request-Id"] in error["message"]
    assert "secret" not in answer.text
    assert "[DONE]" not in answer.text
    assert _counted(answer, "broken", "remote")
    assert "minicluster_e2e_seconds_count 0.0" in answer.extensions["metrics"]  # it is no latency


def test_clients_are_told_to_come_back_at_different_times() -> None:
    """Up to a quarter earlier or later, in whole seconds, and never at once."""
    refusal = Refusal(status=503, message="Later.", retry_after_s=40)
    told = {int(error_response(refusal, {}).headers["Retry-After"]) for _ in range(400)}
    assert (min(told), max(told)) in itertools.product((30, 31, 32), (48, 49, 50))
    assert len(told) > 15
    assert error_response(replace(refusal, retry_after_s=0.2), {}).headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("refusal", "kind", "param", "outcome"),
    [
        (Refusal(status=400, message="Max tokens is bad."), "", "max_tokens", "refused"),
        (Refusal(status=400, message="The prompt is bad."), "", "prompt", "refused"),
        (Refusal(status=400, message="No."), "", None, "refused"),
        (Refusal(status=400, message="Prompt \ud800", param="n"), "", "n", "refused"),
        (Refusal(status=500, message="The prompt."), "server_error", None, "failed"),
        (Refusal(status=503, message="x", retry_after_s=5), "server_error", None, "failed"),
    ],
)
def test_refusals_of_the_servers_come_through(
    config: EndpointConfig, refusal: Refusal, kind: str, param: str | None, outcome: str
) -> None:
    """As they are, as far as they are text; a parameter that only the message names is named."""
    answer = one(config, COMPLETIONS, ONE, servers=FakeServers(refusal=refusal))
    message, kind = refusal.message.replace("\ud800", "?"), kind or "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": None}
    assert (answer.status_code, answer.json()) == (refusal.status, {"error": error})
    assert ("Retry-After" in answer.headers) == (refusal.retry_after_s is not None)
    assert _counted(answer, outcome)


def test_prefill_alone_is_timed(config: EndpointConfig) -> None:
    """The backend's timing comes as JSON, and the request is counted with an outcome of its own."""
    answer = one(config, "/internal/prefill", ONE)
    timing = {"prompt_tokens": 1, "seconds": 0.1, "queue_s": 0.0, "step_s": 0.1}
    assert (answer.status_code, answer.json()) == (200, timing)
    assert _counted(answer, "prefill")


@pytest.mark.parametrize(
    ("origins", "origin", "status", "shown"),
    [
        ("https://ours.example", None, 200, None),
        ("https://ours.example", "http://localhost", 200, None),
        *(
            ("https://a.example, http://b", own, 200, own)
            for own in ("https://a.example", "http://b")
        ),
        ("*", "https://any.example", 200, "*"),
        *(
            ("https://ours.example", bad, 403, None)
            for bad in ("https://evil.example", "http://[x")
        ),
        *(("https://ours.example", bad, 403, None) for bad in ("", "null")),
    ],
)
def test_pages_of_other_sites_are_kept_out(
    config: EndpointConfig, origins: str, origin: str | None, status: int, shown: str | None
) -> None:
    """
    A browser's request from another site is refused unless its origin is named.

    Where it is, the page may read what it needs to try again, and to report a failure.
    """
    headers = {} if origin is None else {"Origin": origin}
    environment = {"MINICLUSTER_CORS_ORIGINS": origins}
    answer = one(config, COMPLETIONS, ONE, headers=headers, environment=environment)
    assert answer.status_code == status
    assert ("MINICLUSTER_CORS_ORIGINS" in answer.text) == (status == 403)  # the way out
    assert answer.headers.get("Access-Control-Allow-Origin") == shown
    exposed = {*answer.headers.get("Access-Control-Expose-Headers", "").split(", ")}
    if shown is not None:
        assert {"X-Request-Id", "X-Minicluster-Path", "Server-Timing", "Retry-After"} <= exposed


EVIL = "evil.example:8000"


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        *((COMPLETIONS, ours, 200) for ours in ("localhost:8000", "LOCALHOST", "127.0.0.1:8000")),
        *((COMPLETIONS, ours, 200) for ours in ("[::1]:8000", "10.1.2.3", "head:8000")),
        *((COMPLETIONS, ours, 200) for ours in ("OURS.example", "gpu-7.example:80")),
        *((COMPLETIONS, bad, 403) for bad in (EVIL, "localhost.evil.example", "127.0.0.1.")),
        *((COMPLETIONS, bad, 403) for bad in ("2130706433", "[x", "localhost@evil.example")),
        *((path, EVIL, 403) for path in ("/", "/plan", "/metrics", "/v1/models", "/ready")),
    ],
)
def test_an_endpoint_without_keys_is_called_by_names_that_are_its_own(
    config: EndpointConfig, path: str, host: str, status: int
) -> None:
    """A page whose name means this machine for its visitor (DNS rebinding) is a stranger's."""
    answer = _named(config, path, host, {"MINICLUSTER_HOSTS": "head, ours.EXAMPLE"})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"


def _named(
    config: EndpointConfig, path: str, host: str, environment: dict[str, str]
) -> httpx.Response:
    body = ONE if path == COMPLETIONS else None
    headers = {"Host": host, "Origin": f"http://{host}", **ALICE}
    return one(config, path, body, headers=headers, environment=environment, host="GPU-7.example")


@pytest.mark.parametrize("environment", [{"MINICLUSTER_HOSTS": "*"}, LOCKED])
def test_any_name_will_do_where_the_operator_says_so_or_a_key_is_needed(
    config: EndpointConfig, environment: dict[str, str]
) -> None:
    assert _named(config, COMPLETIONS, EVIL, environment).status_code == 200


async def _part_by_part(raw: bytes, pause_s: float) -> AsyncIterator[bytes]:
    yield raw[:1]
    await asyncio.sleep(pause_s)
    yield raw[1:]


@in_virtual_time
async def test_a_key_has_its_place_before_its_body_is_read(config: EndpointConfig) -> None:
    """A body of the third request of a key with two is not read; one more is let in at the end."""
    raw = json.dumps(ONE).encode()

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError
        yield b""

    async with visiting(config, environment=LOCKED) as client:
        slow = [
            asyncio.create_task(
                client.post(COMPLETIONS, content=_part_by_part(raw, pause_s), headers=ALICE)
            )
            for pause_s in (2.0, 5.0)
        ]
        await asyncio.sleep(1.0)
        third = await client.post(COMPLETIONS, content=unread(), headers=ALICE)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert third.headers["Retry-After"] in {"1", "2"}
        assert (await slow[0]).status_code == 200
        assert (await client.post(COMPLETIONS, json=ONE, headers=ALICE)).status_code == 200
        assert (await slow[1]).status_code == 200


@in_virtual_time
async def test_slow_bodies_of_one_key_keep_no_other_key_out(config: EndpointConfig) -> None:
    """They wait for each other beyond half of the memory for bodies; too many are refused."""
    large = replace(config, max_model_len=1_000_000)
    raw = json.dumps(ONE).encode().ljust(100_000)
    environment = {"MINICLUSTER_API_KEYS": f"alice:{KEY},bob:{KEY[::-1]}"}
    async with visiting(large, environment=environment) as client:

        async def ask(headers: dict[str, str], pause_s: float) -> int:
            body = _part_by_part(raw, pause_s)
            return (await client.post(COMPLETIONS, content=body, headers=headers)).status_code

        slow = [asyncio.create_task(ask(ALICE, 50.0)) for _ in range(70)]
        await asyncio.sleep(1.0)
        assert [each.result() for each in slow if each.done()] == [503] * 5
        assert await asyncio.wait_for(ask(BOB, 0.0), 1.0) == 200
        for each in slow:
            each.cancel()
        await asyncio.wait(slow)
        assert await ask(ALICE, 0.0) == 200


@in_virtual_time
async def test_what_no_engine_can_answer_reaches_none(config: EndpointConfig) -> None:
    """A 4xx by its parameter that does not ask to come again; all others are answered."""
    servers, small = FakeServers(), replace(config, max_model_len=100, vocab_size=1000)
    async with visiting(small, servers) as client:
        for kind, body, param in REFUSED:
            answer = await client.post(PATHS[kind], json=body)
            status = 404 if param == "model" else 400
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
            assert "Retry-After" not in answer.headers
        assert servers.seen == []
        for kind, body in ACCEPTED:
            answer = await client.post(PATHS[kind], json=body)
            assert answer.status_code == 200, (body, answer.text)
        metrics = (await client.get("/metrics")).text
    assert f'requests_total{{outcome="ok",path="remote"}} {float(len(ACCEPTED))}' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 0.0' in metrics


@in_virtual_time
async def test_long_bodies_are_refused_before_they_are_read(config: EndpointConfig) -> None:
    """A byte beyond 16 per token and 64 KiB is a 413, and its last part is not asked for."""
    most = json.dumps(ONE).encode().ljust(config.max_model_len * 16 + 65_536)

    async def parts() -> AsyncIterator[bytes]:
        yield most
        yield b" "
        raise AssertionError

    async with visiting(config) as client:
        assert (await client.post(COMPLETIONS, content=most)).status_code == 200
        for content in (most + b" ", parts()):
            answer = await client.post(COMPLETIONS, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_long")


def test_answers_keep_the_operators_limit(config: EndpointConfig) -> None:
    """More is refused; nothing said becomes the limit."""
    servers, environment = FakeServers(), {"MINICLUSTER_MAX_OUTPUT_TOKENS": "20"}
    for tokens, status in ((21, 400), (None, 200)):
        body = HI | {"max_tokens": tokens}
        answer = one(config, CHAT, body, servers=servers, environment=environment)
        assert answer.status_code == status
    assert [body["max_tokens"] for body in servers.seen] == [20]


@in_virtual_time
@pytest.mark.parametrize(("replicas", "admitted"), [(1, 8), (2, 16)])
async def test_overload_is_shed_at_once_and_the_endpoint_recovers(
    config: EndpointConfig, replicas: int, admitted: int
) -> None:
    """Of 40 prompts at once those get in that live replicas can take; later ones get in again."""
    body = {"prompt": [5] * 400, "max_tokens": 2, "stream": True}
    servers = FakeServers(ttft_s=0.2, up={("prefill", "d0"): replicas, ("decode", "d0"): 1})
    async with visiting(config, servers) as client:

        async def ask() -> httpx.Response:
            return await client.post(COMPLETIONS, json=body)

        before = await ask()  # with it the endpoint looks what is live
        many = await asyncio.gather(*(ask() for _ in range(40)))
        assert [answer.status_code for answer in (before, await ask())] == [200, 200]
        metrics = (await client.get("/metrics")).text
    shed = [answer for answer in many if answer.status_code == 429]
    # A prefill of 50 ms, a step of 10 ms, a margin of 50 ms: eight prompts fit into 500 ms.
    assert len(shed) == 40 - admitted
    assert {answer.json()["error"]["code"] for answer in shed} == {"slo_ttft"}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in shed)
    assert len(servers.seen) == admitted + 2
    for line in (
        f'shed_total{{reason="ttft"}} {40.0 - admitted}',
        f'requests_total{{outcome="shed",path="none"}} {40.0 - admitted}',
        f'requests_total{{outcome="ok",path="remote"}} {admitted + 2.0}',
        'outstanding_requests{stage="all"} 0.0',
    ):
        assert f"minicluster_{line}" in metrics
    assert servers.open == 0


@in_virtual_time
async def test_the_engines_counts_teach_the_size_of_text(config: EndpointConfig) -> None:
    """A text that never fits is refused for good, and let in when texts turned out to be short."""
    tight = replace(config, slo=SloSpec(ttft_s=0.15, tpot_s=0.05))
    text = {"prompt": "x" * 7000, "max_tokens": 2}  # of 1,750 tokens; some 1,200 keep the TTFT
    async with visiting(tight, FakeServers(bytes_per_token=40)) as client:
        answer = await client.post(COMPLETIONS, json=text)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "slo_unreachable")
        assert answer.headers["X-Should-Retry"] == "false"
        assert "Retry-After" not in answer.headers
        for _ in range(20):
            await client.post(COMPLETIONS, json={**text, "prompt": "x" * 1000})
        assert (await client.post(COMPLETIONS, json=text)).status_code == 200


@in_virtual_time
async def test_an_answer_in_one_piece_leaves_the_prefill_queue_when_its_token_is_due(
    config: EndpointConfig,
) -> None:
    """Its first token is not seen before its last one, and others need not wait for that."""
    async with visiting(config, FakeServers(itl_s=0.02)) as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, json={**ONE, "max_tokens": 50}))
        await asyncio.sleep(0.5)
        metrics = (await client.get("/metrics")).text
        await asking
    assert 'minicluster_outstanding_requests{stage="prefill"} 0.0' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 1.0' in metrics


@in_virtual_time
@pytest.mark.parametrize(
    ("room_bytes", "outstanding", "leaves"),
    [(1 << 20, 0.0, False), (1000, 1.0, False), (1 << 20, 0.0, True)],
)
async def test_a_client_that_does_not_read_holds_nothing_of_the_engine(
    config: EndpointConfig,
    monkeypatch: pytest.MonkeyPatch,
    room_bytes: int,
    outstanding: float,
    *,
    leaves: bool,
) -> None:
    """
    Its request ends with the engine's last token, not with its own, while there is memory.

    That memory is free again when it has read all, or is gone.
    """
    servers = FakeServers(itl_s=0.01)
    ahead = ReadAhead(room_bytes)
    monkeypatch.setattr("serving.api.endpoint.ReadAhead", lambda: ahead)
    app = endpoint_app(config, servers, {})
    reads, got = asyncio.Event(), []

    async def send(message: MutableMapping[str, Any]) -> None:
        await reads.wait()
        got.append(message.get("body", b""))

    raw = json.dumps({**ONE, "max_tokens": 100, "stream": True}).encode()
    messages = iter([{"type": "http.request", "body": raw}])

    async def receive() -> MutableMapping[str, Any]:
        for message in messages:
            return message
        return await asyncio.Future()

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"",
             "headers": [(b"content-length", b"%d" % len(raw))]}  # fmt: skip
    asking = asyncio.create_task(app(scope, receive, send))
    await asyncio.sleep(2.0)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        before = (await client.get("/metrics")).text
        assert ahead.bytes > 900
        if leaves:
            asking.cancel()
        reads.set()
        await asyncio.wait({asking})
        after = (await client.get("/metrics")).text
    assert f'minicluster_outstanding_requests{{stage="all"}} {outstanding}' in before
    if not leaves:
        assert b"".join(got).count(b'"text"') == 100
        assert b"".join(got).endswith(b"data: [DONE]\n\n")
    assert 'minicluster_requests_total{outcome="ok",path="remote"} 1.0' in after
    assert (servers.open, ahead.bytes) == (0, 0)


@in_virtual_time
@pytest.mark.parametrize(("wait_s", "path"), [(0.5, "none"), (1.5, "remote")])
async def test_clients_that_leave_are_counted_out(
    config: EndpointConfig, wait_s: float, path: str
) -> None:
    servers = FakeServers(ttft_s=1.0, itl_s=1.0)
    async with visiting(config, servers) as client:
        ask = client.post(COMPLETIONS, json={**ONE, "max_tokens": 50, "stream": True})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask, wait_s)
        metrics = (await client.get("/metrics")).text
    assert f'minicluster_requests_total{{outcome="cancelled",path="{path}"}} 1.0' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 0.0' in metrics
    assert servers.open == 0
