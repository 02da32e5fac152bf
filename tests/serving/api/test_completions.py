"""The endpoint over pools that need no engine: what it lets in, passes on, counts and hides."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from minicluster.specs.slo import SloSpec
from serving.api.app import api_app
from serving.api.errors import error_response
from serving.api.tracker import ReadAhead
from serving.protocol.messages import Refusal
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import HI, KEY, LOCKED, ONE, one, used
from tests.serving.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

    from serving.protocol.endpoint_config import EndpointConfig

BROKEN = FakeServers(ttft_s="no time")  # type: ignore[arg-type]
"""Servers that raise TypeError."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _events(answer: httpx.Response) -> list[str]:
    return [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]


def _answer_and_metrics(
    config: EndpointConfig, servers: FakeServers, body: dict[str, Any], path: str = COMPLETIONS
) -> tuple[httpx.Response, str]:
    async def use(client: httpx.AsyncClient) -> tuple[httpx.Response, str]:
        answer = await client.post(path, json=body)
        return answer, (await client.get("/metrics")).text

    answer, metrics = used(config, servers, use)
    return answer, metrics


@pytest.fixture
def tight(config: EndpointConfig) -> EndpointConfig:
    """Return a plan whose TTFT some 1,200 tokens of prompt keep."""
    return replace(config, slo=SloSpec(ttft_s=0.15, tpot_s=0.05))


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, ONE), (CHAT, HI)])
def test_answers_in_one_piece_and_in_events(
    config: EndpointConfig, path: str, body: dict[str, Any]
) -> None:
    """Both say the same, by which path, under which id; usage goes to clients that ask for it."""
    whole = one(config, path, body)
    assert (whole.status_code, whole.json()["usage"]["completion_tokens"]) == (200, 4)
    servers, streamed = FakeServers(), {**body, "stream": True}
    answer = one(config, path, streamed, servers=servers, headers={"X-Request-Id": "mine-7"})
    assert answer.headers["X-Request-Id"] == "mine-7"
    assert answer.headers["X-Minicluster-Path"] == "remote"
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = _events(answer)
    assert done == "[DONE]"
    assert [bool(json.loads(chunk)["choices"]) for chunk in chunks] == [True] * 4
    assert servers.seen[0]["stream_options"] == {"include_usage": True}  # we count, they do not see
    *_, usage, _ = _events(
        one(config, path, streamed | {"stream_options": {"include_usage": True}})
    )
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
    streamed = {**ONE, "stream": True}
    answer, metrics = _answer_and_metrics(config, FakeServers(fails_after=2), streamed)
    *chunks, last = _events(answer)
    assert 'minicluster_requests_total{outcome="broken",path="remote"} 1.0' in metrics
    error = json.loads(last)["error"]
    assert len(chunks) == 2
    assert (error["type"], error["code"]) == ("server_error", None)
    assert answer.headers["X-Request-Id"] in error["message"]
    assert "secret" not in answer.text
    assert "[DONE]" not in answer.text


def test_clients_are_told_to_come_back_at_different_times() -> None:
    """Up to a quarter earlier or later, in whole seconds."""
    refusal = Refusal(status=503, message="Later.", retry_after_s=40)
    told = {int(error_response(refusal, {}).headers["Retry-After"]) for _ in range(400)}
    assert (min(told), max(told)) in itertools.product((30, 31, 32), (48, 49, 50))
    assert len(told) > 15


@pytest.mark.parametrize(
    ("status", "retry_after_s", "told", "kind", "outcome"),
    [
        (400, None, {None}, "invalid_request_error", "refused"),
        (500, 0.2, {"1"}, "server_error", "failed"),
        (503, 5.0, {"4", "5", "6", "7"}, "server_error", "failed"),
        (504, 7.9, {"6", "7", "8", "9", "10"}, "server_error", "failed"),
    ],
)
def test_refusals_of_the_servers_come_through(
    config: EndpointConfig,
    status: int,
    retry_after_s: float | None,
    told: set[str | None],
    kind: str,
    outcome: str,
) -> None:
    """What decode refuses, clients get as it is, as far as it is text, with when to come again."""
    refusal = Refusal(
        status=status, message="Because\ud800.", param="prompt", retry_after_s=retry_after_s
    )
    answer, metrics = _answer_and_metrics(config, FakeServers(refusal=refusal), ONE)
    error = {"message": "Because?.", "type": kind, "param": "prompt", "code": None}
    assert (answer.status_code, answer.json()) == (status, {"error": error})
    assert answer.headers.get("Retry-After") in told
    assert f'minicluster_requests_total{{outcome="{outcome}",path="none"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("message", "param"),
    [("Max tokens is too large.", "max_tokens"), ("The prompt is bad.", "prompt"), ("No.", None)],
)
def test_the_parameter_at_fault_is_named(
    config: EndpointConfig, message: str, param: str | None
) -> None:
    """The engine often names it in its message alone."""
    servers = FakeServers(refusal=Refusal(status=400, message=message))
    answer = one(config, COMPLETIONS, ONE, servers=servers)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, None),
        ("GET", COMPLETIONS, 405, None),
        ("POST", "/plan", 405, None),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ],
)
def test_what_is_not_there_is_refused_in_the_same_shape(
    config: EndpointConfig, method: str, path: str, status: int, code: str | None
) -> None:
    answer = used(config, FakeServers(), lambda client: client.request(method, path))
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code
    assert answer.headers["X-Request-Id"]


def test_prefill_alone_is_timed(config: EndpointConfig) -> None:
    """The backend's timing comes as JSON, and the request is counted with an outcome of its own."""
    answer, metrics = _answer_and_metrics(config, FakeServers(), ONE, "/internal/prefill")
    timing = {"prompt_tokens": 1, "seconds": 0.1, "queue_s": 0.0, "step_s": 0.1}
    assert (answer.status_code, answer.json()) == (200, timing)
    assert 'minicluster_requests_total{outcome="prefill",path="none"} 1.0' in metrics


def test_a_key_has_as_many_requests_as_its_limit(config: EndpointConfig) -> None:
    """The third of a key with two is turned away at once, and let in when one has ended."""
    headers = {"Authorization": f"Bearer {KEY}"}

    async def use(client: httpx.AsyncClient) -> list[int]:
        async def ask() -> httpx.Response:
            return await client.post(COMPLETIONS, json=ONE, headers=headers)

        three = await asyncio.gather(ask(), ask(), ask())
        refused = [answer for answer in three if answer.status_code == 429]
        assert {answer.headers["Retry-After"] for answer in refused} <= {"1", "2"}
        return [answer.status_code for answer in (*three, await ask())]

    assert sorted(used(config, FakeServers(ttft_s=0.1), use, LOCKED)) == [200, 200, 200, 429]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost", 200),
        ("https://ours.example", 200),
        ("https://evil.example", 403),
        ("http://[x", 403),
        ("", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_sites_are_kept_out(
    config: EndpointConfig, origin: str | None, status: int
) -> None:
    """A browser's request from another site is refused unless its origin is named."""
    headers = {} if origin is None else {"Origin": origin}
    environment = {"MINICLUSTER_CORS_ORIGINS": "https://ours.example"}
    answer = one(config, COMPLETIONS, ONE, headers=headers, environment=environment)
    assert answer.status_code == status
    assert ("MINICLUSTER_CORS_ORIGINS" in answer.text) is (status == 403)  # the way out
    allowed = answer.headers.get("Access-Control-Allow-Origin")
    assert allowed == (origin if origin == "https://ours.example" else None)


def test_every_origin_may_be_allowed(config: EndpointConfig) -> None:
    """A page may then read what it needs to try again, and to report a failure."""
    environment = {"MINICLUSTER_CORS_ORIGINS": "*"}
    headers = {"Origin": "https://any.example"}
    answer = one(config, COMPLETIONS, ONE, headers=headers, environment=environment)
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, "*")
    exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-Id", "X-Minicluster-Path", "Server-Timing", "Retry-After"} <= {*exposed}


@pytest.mark.parametrize("path", ["/", "/plan", "/metrics", "/v1/models", "/ready", COMPLETIONS])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000")),
        *((name, 200) for name in ("10.1.2.3", "head:8000", "OURS.example", "gpu-7.example:80")),
        *((name, 403) for name in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.")),
        *((name, 403) for name in ("2130706433", "[x", "localhost@evil.example")),
    ],
)
def test_an_endpoint_without_keys_is_called_by_names_that_are_its_own(
    config: EndpointConfig, path: str, host: str, status: int
) -> None:
    """A page whose name means this machine for its visitor (DNS rebinding) is a stranger's."""
    body = ONE if path == COMPLETIONS else None
    environment = {"MINICLUSTER_HOSTS": "head, ours.EXAMPLE"}
    headers = {"Host": host, "Origin": f"http://{host}"}

    async def use(client: httpx.AsyncClient) -> httpx.Response:
        method = "GET" if body is None else "POST"
        return await client.request(method, path, json=body, headers=headers)

    answer = used(config, FakeServers(), use, environment, host="GPU-7.example")
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"
    assert used(config, FakeServers(), use, {"MINICLUSTER_HOSTS": "*"}).status_code == 200
    assert used(config, FakeServers(), use, LOCKED).status_code in {200, 401}


async def _part_by_part(raw: bytes, pause_s: float) -> AsyncIterator[bytes]:
    yield raw[:1]
    await asyncio.sleep(pause_s)
    yield raw[1:]


def test_a_key_has_its_place_before_its_body_is_read(config: EndpointConfig) -> None:
    """A body of the third request of a key with two is not read, however slow the first two are."""
    headers = {"Authorization": f"Bearer {KEY}"}
    raw = json.dumps(ONE).encode()

    async def use(client: httpx.AsyncClient) -> list[int]:
        slow = [
            asyncio.create_task(
                client.post(COMPLETIONS, content=_part_by_part(raw, 5.0), headers=headers)
            )
            for _ in range(2)
        ]
        await asyncio.sleep(1.0)

        async def unread() -> AsyncIterator[bytes]:
            raise AssertionError
            yield b""

        third = await client.post(COMPLETIONS, content=unread(), headers=headers)
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        return [third.status_code, *[each.status_code for each in await asyncio.gather(*slow)]]

    assert used(config, FakeServers(), use, LOCKED) == [429, 200, 200]


def test_slow_bodies_of_one_key_keep_no_other_key_out(config: EndpointConfig) -> None:
    """They wait for each other beyond half of the memory for bodies; too many are refused."""
    large = replace(config, max_model_len=1_000_000)
    raw = json.dumps(ONE).encode().ljust(100_000)
    environment = {"MINICLUSTER_API_KEYS": f"alice:{KEY},bob:{KEY[::-1]}"}

    async def use(client: httpx.AsyncClient) -> None:
        async def ask(key: str, pause_s: float) -> int:
            body, headers = _part_by_part(raw, pause_s), {"Authorization": f"Bearer {key}"}
            return (await client.post(COMPLETIONS, content=body, headers=headers)).status_code

        slow = [asyncio.create_task(ask(KEY, 50.0)) for _ in range(70)]
        await asyncio.sleep(1.0)
        assert [each.result() for each in slow if each.done()] == [503] * 5
        assert await asyncio.wait_for(ask(KEY[::-1], 0.0), 1.0) == 200
        for each in slow:
            each.cancel()
        await asyncio.wait(slow)
        assert await ask(KEY, 0.0) == 200

    used(large, FakeServers(), use, environment)


def test_long_bodies_are_refused_before_they_are_read(config: EndpointConfig) -> None:
    """A byte beyond 16 per token and 64 KiB is a 413, and its last part is not asked for."""
    most = json.dumps(ONE).encode().ljust(config.max_model_len * 16 + 65_536)
    assert one(config, COMPLETIONS, most).status_code == 200
    answer = one(config, COMPLETIONS, most + b" ")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_long")

    async def parts() -> AsyncIterator[bytes]:
        yield most
        yield b" "
        raise AssertionError

    answer = used(config, FakeServers(), lambda client: client.post(COMPLETIONS, content=parts()))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_long")


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        (COMPLETIONS, {"prompt": [[5] * 1970, [6]], "max_tokens": None}, 14),
        (CHAT, HI | {"max_tokens": None}, 20),
        (CHAT, HI | {"max_tokens": 21}, 400),
    ],
)
def test_answers_keep_the_operators_limit(
    config: EndpointConfig, path: str, body: dict[str, Any], sent: int | None
) -> None:
    """More is refused, nothing said becomes the limit, and no prompt is refused for it."""
    servers = FakeServers()
    environment = {"MINICLUSTER_MAX_OUTPUT_TOKENS": "20"}
    answer = one(config, path, body, servers=servers, environment=environment)
    if sent == 400:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    else:
        assert answer.status_code == 200
        assert servers.seen[0].get("max_tokens") == sent


@pytest.mark.parametrize(("replicas", "admitted"), [(1, 8), (2, 16)])
def test_overload_is_shed_at_once_and_the_endpoint_recovers(
    config: EndpointConfig, replicas: int, admitted: int
) -> None:
    """Of 40 prompts at once those get in that live replicas can take; later ones get in again."""
    body = {"prompt": [5] * 400, "max_tokens": 2, "stream": True}
    servers = FakeServers(ttft_s=0.2, up={("prefill", "d0"): replicas, ("decode", "d0"): 1})

    async def use(client: httpx.AsyncClient) -> tuple[list[httpx.Response], str]:
        async def ask() -> httpx.Response:
            return await client.post(COMPLETIONS, json=body)

        before = await ask()  # with it the endpoint looks what is live
        many = await asyncio.gather(*(ask() for _ in range(40)))
        assert [answer.status_code for answer in (before, await ask())] == [200, 200]
        return many, (await client.get("/metrics")).text

    many, metrics = used(config, servers, use)
    shed = [answer for answer in many if answer.status_code == 429]
    # A prefill of 50 ms, a step of 10 ms, a margin of 50 ms: eight prompts fit into 500 ms.
    assert len(shed) == 40 - admitted
    assert {answer.json()["error"]["code"] for answer in shed} == {"slo_ttft"}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in shed)
    assert len(servers.seen) == admitted + 2
    assert f'minicluster_shed_total{{reason="ttft"}} {40.0 - admitted}' in metrics
    ok = f'minicluster_requests_total{{outcome="ok",path="remote"}} {admitted + 2.0}'
    assert ok in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 0.0' in metrics
    assert servers.open == 0


def test_what_never_fits_is_not_to_be_retried(tight: EndpointConfig) -> None:
    """A prompt whose prefill alone takes longer than the SLO allows is refused for good."""
    answer = one(tight, COMPLETIONS, {"prompt": [5] * 2000, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "slo_unreachable")
    assert answer.headers["X-Should-Retry"] == "false"
    assert "Retry-After" not in answer.headers


def _statuses(
    config: EndpointConfig, template_tokens: int, asked: list[tuple[str, dict[str, Any]]]
) -> list[int]:
    """Send requests one after the other to an engine with a template of that length."""

    async def use(client: httpx.AsyncClient) -> list[int]:
        answers = [await client.post(path, json=body) for path, body in asked]
        return [answer.status_code for answer in answers]

    statuses: list[int] = used(config, FakeServers(template_tokens=template_tokens), use)
    return statuses


def _chat(length: int, **more: object) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": "x" * length}
    return CHAT, {"messages": [message], "max_tokens": 2, **more}


def test_texts_teach_only_the_size_of_texts_like_them(tight: EndpointConfig) -> None:
    """A template's tokens are no text's, and a prompt beside messages is no lesson."""
    assert _statuses(tight, 30, [*([_chat(2)] * 100), _chat(4000)]) == [200] * 101
    text = (COMPLETIONS, {"prompt": "x" * 4000, "max_tokens": 2})
    assert _statuses(tight, 30, [*([_chat(4000, prompt="x")] * 20), text]) == [200] * 21


def test_an_answer_in_one_piece_leaves_the_prefill_queue_when_its_token_is_due(
    config: EndpointConfig,
) -> None:
    """Its first token is not seen before its last one, and others need not wait for that."""

    async def use(client: httpx.AsyncClient) -> str:
        body = {**ONE, "max_tokens": 50}
        asking = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await asyncio.sleep(0.5)
        metrics = (await client.get("/metrics")).text
        await asking
        return metrics

    metrics = used(config, FakeServers(itl_s=0.02), use)
    assert 'minicluster_outstanding_requests{stage="prefill"} 0.0' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 1.0' in metrics


@pytest.mark.parametrize(("room_bytes", "outstanding"), [(1 << 20, 0.0), (1000, 1.0)])
def test_a_client_that_does_not_read_holds_nothing_of_the_engine(
    config: EndpointConfig, monkeypatch: pytest.MonkeyPatch, room_bytes: int, outstanding: float
) -> None:
    """Its request ends with the engine's last token, not with its own, while there is memory."""
    servers = FakeServers(itl_s=0.01)
    monkeypatch.setattr("serving.api.completions.ReadAhead", lambda: ReadAhead(room_bytes))

    async def talk() -> tuple[str, list[bytes], str]:
        app = api_app(config, servers, {})
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
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost"
        ) as client:
            before = (await client.get("/metrics")).text
            reads.set()
            await asking
            return before, got, (await client.get("/metrics")).text

    before, got, after = run(talk())
    assert f'minicluster_outstanding_requests{{stage="all"}} {outstanding}' in before
    assert b"".join(got).count(b'"text"') == 100
    assert b"".join(got).endswith(b"data: [DONE]\n\n")
    assert 'minicluster_requests_total{outcome="ok",path="remote"} 1.0' in after
    assert servers.open == 0


@pytest.mark.parametrize(("wait_s", "path"), [(0.5, "none"), (1.5, "remote")])
def test_clients_that_leave_are_counted_out(
    config: EndpointConfig, wait_s: float, path: str
) -> None:
    servers = FakeServers(ttft_s=1.0, itl_s=1.0)

    async def use(client: httpx.AsyncClient) -> str:
        ask = client.post(COMPLETIONS, json={**ONE, "max_tokens": 50, "stream": True})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask, wait_s)
        return (await client.get("/metrics")).text

    metrics = used(config, servers, use)
    assert f'minicluster_requests_total{{outcome="cancelled",path="{path}"}} 1.0' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 0.0' in metrics
    assert servers.open == 0
