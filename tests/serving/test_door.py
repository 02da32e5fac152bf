"""The front door over pools that need no engine: what it lets in, passes on, counts and hides."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from serving.front import FrontDoor, front_door
from serving.front_app import front_app
from serving.requests import MAX_BODY_BYTES, Refusal
from sizing.specs.slo import SloSpec

from .fake_servers import FakeServers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from .conftest import DeploymentMaker, PlanMaker

    Use = Callable[[httpx.AsyncClient], Awaitable[Any]]

KEY = "a-secret-of-the-tests"
LOCKED = {"MINICLUSTER_API_KEYS": f"alice:{KEY}:2"}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ONE = {"prompt": [5, 6, 7], "max_tokens": 4}


@pytest.fixture(scope="module")
def front(make_deployment: DeploymentMaker, make_plan: PlanMaker, small_model: Path) -> FrontDoor:
    """Return a plan of one replica each: 10 ms a step and 0.1 ms a prompt token."""
    deployment = make_deployment(small_model)
    plan = replace(make_plan(deployment), slo=SloSpec(ttft_s=0.5, tpot_s=0.05))
    return front_door(deployment, domains={"laptop": "d0"}, plan=plan, plan_hash="cafe")


def _used(
    front: FrontDoor, servers: FakeServers, use: Use, environment: dict[str, str] | None = None
) -> Any:  # noqa: ANN401
    """Let *use* talk to a front door in this process."""

    async def run() -> Any:  # noqa: ANN401
        app = front_app(front, servers, environment or {})
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return await use(client)

    return asyncio.run(run())


def _one(
    front: FrontDoor,
    path: str,
    body: object = None,
    *,
    servers: FakeServers | None = None,
    headers: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
) -> httpx.Response:
    """Send one request: GET without a body."""

    async def use(client: httpx.AsyncClient) -> httpx.Response:
        if body is None:
            return await client.get(path, headers=headers)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=raw, headers=headers)

    answer: httpx.Response = _used(front, servers or FakeServers(), use, environment)
    return answer


def _events(answer: httpx.Response) -> list[str]:
    """Return the data of server-sent events."""
    return [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ONE), ("/v1/chat/completions", HI)])
def test_answers_in_one_piece_and_in_events(
    front: FrontDoor, path: str, body: dict[str, Any]
) -> None:
    """Both say the same, by which way, under which id; a client that did not ask gets no usage."""
    whole = _one(front, path, body)
    assert (whole.status_code, whole.json()["usage"]["completion_tokens"]) == (200, 4)
    servers = FakeServers()
    answer = _one(
        front, path, {**body, "stream": True}, servers=servers, headers={"X-Request-Id": "mine-7"}
    )
    assert answer.headers["X-Request-Id"] == "mine-7"
    assert answer.headers["X-Minicluster-Path"] == "remote"
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = _events(answer)
    assert done == "[DONE]"
    assert [bool(json.loads(chunk)["choices"]) for chunk in chunks] == [True] * 4
    assert servers.seen[0]["stream_options"] == {"include_usage": True}  # we count, they do not see
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *_, usage, _ = _events(_one(front, path, asked))
    assert json.loads(usage)["usage"]["completion_tokens"] == 4


def test_a_stream_that_breaks_ends_with_an_error_and_no_done(front: FrontDoor) -> None:
    """Clients are told, without the engine's words; the answer does not look complete."""
    servers = FakeServers(fails_after=2)
    answer = _one(front, "/v1/completions", {**ONE, "stream": True}, servers=servers)
    *chunks, last = _events(answer)
    error = json.loads(last)["error"]
    assert len(chunks) == 2
    assert (error["type"], error["code"]) == ("server_error", None)
    assert answer.headers["X-Request-Id"] in error["message"]
    assert "secret" not in answer.text
    assert "[DONE]" not in answer.text


def test_failures_show_none_of_our_insides(front: FrontDoor) -> None:
    """An exception is a 500 that names the request, and nothing else."""
    answer = _one(front, "/v1/completions", ONE, servers=FakeServers(ttft_s="no time"))  # type: ignore[arg-type]
    assert answer.status_code == 500
    assert answer.headers["X-Request-Id"] in answer.json()["error"]["message"]
    assert "str" not in answer.text


@pytest.mark.parametrize("status", [400, 503, 504])
def test_refusals_of_the_servers_come_through(front: FrontDoor, status: int) -> None:
    """What decode refuses, clients get as it is, with when to come again."""
    refusal = Refusal(status=status, message="Because.", param="prompt", retry_after_s=4.2)
    answer = _one(front, "/v1/completions", ONE, servers=FakeServers(refusal=refusal))
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, "Because.")
    assert answer.headers["Retry-After"] == "5"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/plan", 405)],
)
def test_what_is_not_there_is_refused_in_the_same_shape(
    front: FrontDoor, method: str, path: str, status: int
) -> None:
    """Unknown paths and methods get OpenAI's error object too."""

    async def use(client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(method, path)

    answer = _used(front, FakeServers(), use)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["X-Request-Id"]


LOOKED_AT = ["/v1/models", "/v1/models/demo", "/plan", "/metrics"]


@pytest.mark.parametrize("path", LOOKED_AT)
def test_keys_lock_what_tells_something(front: FrontDoor, path: str) -> None:
    """With keys, everything but health, readiness, schema and the empty page wants one."""
    assert _one(front, path).status_code == 200
    refused = _one(front, path, environment=LOCKED)
    assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    right = {"Authorization": f"Bearer {KEY}"}
    assert _one(front, path, headers=right, environment=LOCKED).status_code == 200
    wrong = {"Authorization": f"Bearer {KEY}x"}
    assert _one(front, path, headers=wrong, environment=LOCKED).status_code == 401
    for open_to_all in ("/health", "/ready", "/openapi.json", "/"):
        assert _one(front, open_to_all, environment=LOCKED).status_code == 200


def test_without_its_key_nothing_is_computed(front: FrontDoor) -> None:
    """Prefill and decode never hear of a request without a key."""
    servers = FakeServers()
    for path in ("/v1/completions", "/v1/chat/completions", "/internal/prefill"):
        answer = _one(front, path, {**ONE, **HI}, servers=servers, environment=LOCKED)
        assert answer.status_code == 401
    assert servers.seen == []


def test_a_key_has_as_many_requests_as_its_limit(front: FrontDoor) -> None:
    """The third of a key with two is turned away at once, and let in when one has ended."""
    headers = {"Authorization": f"Bearer {KEY}"}

    async def use(client: httpx.AsyncClient) -> list[int]:
        async def ask() -> httpx.Response:
            return await client.post("/v1/completions", json=ONE, headers=headers)

        three = await asyncio.gather(ask(), ask(), ask())
        refused = [answer for answer in three if answer.status_code == 429]
        assert [answer.headers["Retry-After"] for answer in refused] == ["1"]
        return [answer.status_code for answer in (*three, await ask())]

    assert sorted(_used(front, FakeServers(ttft_s=0.1), use, LOCKED)) == [200, 200, 200, 429]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://door", 200),
        ("https://ours.example", 200),
        ("https://evil.example", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_sites_are_kept_out(
    front: FrontDoor, origin: str | None, status: int
) -> None:
    """A browser's request from another site is refused unless its origin is named."""
    headers = {} if origin is None else {"Origin": origin}
    environment = {"MINICLUSTER_CORS_ORIGINS": "https://ours.example"}
    answer = _one(front, "/v1/completions", ONE, headers=headers, environment=environment)
    assert answer.status_code == status
    assert ("MINICLUSTER_CORS_ORIGINS" in answer.text) is (status == 403)  # the way out
    allowed = answer.headers.get("Access-Control-Allow-Origin")
    assert allowed == (origin if origin == "https://ours.example" else None)


def test_long_bodies_are_refused_before_they_are_read(front: FrontDoor) -> None:
    """One byte too many is a 413, announced or not."""
    long = b"[" * (MAX_BODY_BYTES + 1)
    assert _one(front, "/v1/completions", long).status_code == 413

    async def use(client: httpx.AsyncClient) -> httpx.Response:
        async def parts() -> Any:  # noqa: ANN401
            for start in range(0, len(long), 1 << 20):
                yield long[start : start + (1 << 20)]

        return await client.post("/v1/completions", content=parts())

    assert _used(front, FakeServers(), use).status_code == 413


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        ("completions", {"prompt": "x", "max_tokens": 20}, 20),
        ("completions", {"prompt": "x"}, None),  # the engine makes 16
        ("completions", {"prompt": "x", "max_tokens": None}, 20),
        ("completions", {"prompt": [[5] * 1970, [6]], "max_tokens": None}, 14),
        ("completions", {"prompt": "x" * 3000, "max_tokens": None}, None),
        ("completions", {"prompt": "x", "max_tokens": 21}, 400),
        ("completions", {"prompt": "x", "max_tokens": 21, "max_completion_tokens": 1}, 400),
        ("chat/completions", HI | {"max_tokens": None}, 20),
        ("chat/completions", HI | {"max_tokens": 21}, 400),
        ("chat/completions", HI | {"max_tokens": None, "prompt": "x" * 3000}, 20),
    ],
)
def test_answers_keep_the_operators_limit(
    front: FrontDoor, path: str, body: dict[str, Any], sent: int | None
) -> None:
    """More is refused, nothing said becomes the limit, and no prompt is refused for it."""
    servers = FakeServers()
    environment = {"MINICLUSTER_MAX_OUTPUT_TOKENS": "20"}
    answer = _one(front, f"/v1/{path}", body, servers=servers, environment=environment)
    if sent == 400:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    else:
        assert answer.status_code == 200
        assert servers.seen[0].get("max_tokens") == sent


@pytest.mark.parametrize("depth", [63, 100, 900])
@pytest.mark.parametrize("param", ["messages", "logit_bias", "prompt"])
def test_deep_bodies_are_refused(front: FrontDoor, depth: int, param: str) -> None:
    """What recurses behind the door never meets a body that is too deep for it."""
    raw = f'{{"prompt": [5], "{param}": {"[" * depth}{"]" * depth}}}'.encode()
    answer = _one(front, "/v1/completions", raw)
    deep = "nested too deeply" in answer.text
    assert answer.status_code < 500
    assert deep == (depth > 63)


@pytest.mark.parametrize("body", [{"prompt": "\ud800"}, {"prompt": "x", "\udfff": 1}])
def test_half_characters_are_refused(front: FrontDoor, body: dict[str, Any]) -> None:
    """Text that no encoding has is refused, and the refusal is text."""
    answer = _one(front, "/v1/completions", body)
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]


def test_overload_is_shed_at_once_and_the_door_recovers(front: FrontDoor) -> None:
    """Of 40 prompts at once as many get in as the promise allows; later ones get in again."""
    body = {"prompt": [5] * 400, "max_tokens": 2, "stream": True}
    servers = FakeServers(ttft_s=0.2)

    async def use(client: httpx.AsyncClient) -> tuple[list[httpx.Response], httpx.Response, str]:
        async def ask() -> httpx.Response:
            return await client.post("/v1/completions", json=body)

        many = await asyncio.gather(*(ask() for _ in range(40)))
        return many, await ask(), (await client.get("/metrics")).text

    many, after, metrics = _used(front, servers, use)
    shed = [answer for answer in many if answer.status_code == 429]
    assert len(shed) == 32  # as `test_guard` reckons
    assert {answer.json()["error"]["code"] for answer in shed} == {"slo_ttft"}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in shed)
    assert len(servers.seen) == 9
    assert after.status_code == 200
    assert 'minicluster_shed_total{reason="ttft"} 32.0' in metrics
    assert 'minicluster_requests_total{outcome="ok",path="remote"} 9.0' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 0.0' in metrics
    assert servers.open == 0


def test_what_never_fits_is_told_not_to_come_back(front: FrontDoor) -> None:
    """A prompt whose prefill alone takes longer than promised is refused for good."""
    slow = replace(front, slo=SloSpec(ttft_s=0.1, tpot_s=0.05))
    answer = _one(slow, "/v1/completions", {"prompt": [5] * 1500, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "slo_unreachable")
    assert answer.headers["X-Should-Retry"] == "false"
    assert "Retry-After" not in answer.headers


def test_short_chats_shut_no_long_prompt_out(front: FrontDoor) -> None:
    """A template's tokens are no text's: after many short chats a long one is sized as before."""
    tight = replace(front, slo=SloSpec(ttft_s=0.15, tpot_s=0.05))  # some 1,200 tokens of prompt
    servers = FakeServers(template_tokens=30)
    long = {"messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 2}

    async def use(client: httpx.AsyncClient) -> list[int]:
        asked = [*([HI] * 100), long]
        answers = [await client.post("/v1/chat/completions", json=body) for body in asked]
        return [answer.status_code for answer in answers]

    assert _used(tight, servers, use) == [200] * 101


def test_a_prompt_beside_messages_teaches_nothing(front: FrontDoor) -> None:
    """Chats are sized by their messages, whatever else is in the body; the rest is no lesson."""
    tight = replace(front, slo=SloSpec(ttft_s=0.15, tpot_s=0.05))
    both = {"messages": [{"role": "user", "content": "x" * 4000}], "prompt": "x", "max_tokens": 2}
    text = {"prompt": "x" * 4000, "max_tokens": 2}

    async def use(client: httpx.AsyncClient) -> list[int]:
        chats = [await client.post("/v1/chat/completions", json=both) for _ in range(20)]
        return [
            each.status_code for each in (*chats, await client.post("/v1/completions", json=text))
        ]

    assert _used(tight, FakeServers(template_tokens=30), use) == [200] * 21


def test_refusals_for_a_guessed_size_do_not_last(front: FrontDoor) -> None:
    """Texts dense with tokens make a long one look too long; refused often enough, it gets in."""
    tight = replace(front, slo=SloSpec(ttft_s=0.15, tpot_s=0.05))
    dense = {"messages": [{"role": "user", "content": "x" * 900}], "max_tokens": 2}
    long = {"messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 2}
    servers = FakeServers(template_tokens=675)

    async def use(client: httpx.AsyncClient) -> list[int]:
        asked = [*([dense] * 50), *([long] * 100)]
        answers = [await client.post("/v1/chat/completions", json=body) for body in asked]
        return [answer.status_code for answer in answers]

    statuses = _used(tight, servers, use)
    assert statuses[:50] == [200] * 50
    assert statuses[50] == 429
    assert 200 in statuses[51:]


def test_metrics_stand_beside_what_was_planned(front: FrontDoor) -> None:
    """A stream is measured exactly: tokens from the engine's count, one gap a chunk."""
    body = {**ONE, "max_tokens": 11, "stream": True}

    async def use(client: httpx.AsyncClient) -> tuple[str, dict[str, Any]]:
        await client.post("/v1/completions", json=body)
        return (await client.get("/metrics")).text, (await client.get("/plan")).json()

    metrics, plan = _used(front, FakeServers(ttft_s=0.05, itl_s=0.002), use)
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    for name, count in {"ttft": 1, "tpot": 1, "itl": 10, "e2e": 1, "kv_transfer": 1}.items():
        assert float(lines[f"minicluster_{name}_seconds_count"]) == count, name
    assert float(lines["minicluster_ttft_seconds_sum"]) >= 0.05
    assert float(lines["minicluster_tpot_seconds_sum"]) >= 0.002
    assert lines['minicluster_tokens_total{kind="output"}'] == "11.0"
    assert lines['minicluster_planned_seconds{percentile="p99",quantity="ttft"}'] == "0.1"
    assert lines['minicluster_planned_seconds{percentile="mean",quantity="prefill"}'] == "0.1"
    assert lines['minicluster_slo_seconds{quantity="ttft"}'] == "0.5"
    assert 'minicluster_ttft_seconds_bucket{le="0.5"}' in lines  # attainment is read off exactly
    assert plan["measured"]["ttft"]["p99_s"] >= 0.05
    assert plan["planned"]["plan_hash"] == "cafe"
    running = {"planned": 1, "running": 1}
    assert plan["deployed"]["engines"]["decode"] == {"d0": {"tp": 1}}
    assert plan["deployed"]["replicas"] == {"prefill": {"d0": running}, "decode": {"d0": running}}


def test_ready_needs_both_pools_and_an_answer(front: FrontDoor) -> None:
    """A pool without replicas, a probe that fails or one that found no prefill: not ready."""
    assert _one(front, "/ready").json() == {"ready": True, "lacking": []}
    without = FakeServers(up={("prefill", "d0"): 0, ("decode", "d0"): 1})
    refusal = Refusal(status=503, message="No prefill replica is up.")
    for servers, lacking in (
        (without, "no prefill replica is up"),
        (FakeServers(refusal=refusal), "a probe was refused: No prefill replica is up."),
        (
            FakeServers(path="fallback-local"),
            "a probe was answered without prefill: fallback-local",
        ),
        (FakeServers(ttft_s="no time"), "a probe failed"),  # type: ignore[arg-type]
    ):
        answer = _one(front, "/ready", servers=servers)
        assert (answer.status_code, answer.json()["lacking"]) == (503, [lacking])
    assert _one(front, "/health", servers=without).status_code == 200  # the door itself is well


def test_who_asks_often_whether_it_is_ready_costs_one_probe(front: FrontDoor) -> None:
    """Readiness is probed once in a while, and not at all while clients are answered."""
    servers = FakeServers()

    async def use(client: httpx.AsyncClient) -> None:
        for _ in range(20):
            assert (await client.get("/ready")).status_code == 200

    _used(front, servers, use)
    assert len(servers.seen) == 1


def test_clients_that_leave_are_counted_out(front: FrontDoor) -> None:
    """A client that goes before or during its answer leaves nothing behind."""
    servers = FakeServers(ttft_s=0.05, itl_s=0.02)

    async def run() -> str:
        app = front_app(front, servers, {})
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            for patience_s in (0.02, 0.12):
                ask = client.post("/v1/completions", json={**ONE, "max_tokens": 50, "stream": True})
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(ask, patience_s)
            return (await client.get("/metrics")).text

    metrics = asyncio.run(run())
    assert 'minicluster_requests_total{outcome="cancelled",path="none"} 1.0' in metrics
    assert 'minicluster_requests_total{outcome="cancelled",path="remote"} 1.0' in metrics
    assert 'minicluster_outstanding_requests{stage="all"} 0.0' in metrics
    assert servers.open == 0


def test_the_page_can_keep_the_limit(front: FrontDoor) -> None:
    """It learns from `/plan` how long an answer it may ask for."""
    environment = {"MINICLUSTER_MAX_OUTPUT_TOKENS": "20"}
    plan = _one(front, "/plan", environment=environment).json()
    assert plan["deployed"]["max_output_tokens"] == 20
    assert _one(front, "/plan").json()["deployed"]["max_output_tokens"] is None


def test_the_page_loads_nothing_from_elsewhere(front: FrontDoor) -> None:
    """One file, no address in it, and a policy under which only its own script runs."""
    answer = _one(front, "/")
    assert "http" not in answer.text.replace("http-equiv", "")
    assert " src=" not in answer.text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "unsafe-inline" not in answer.headers["Content-Security-Policy"]
