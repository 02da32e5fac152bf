"""A visitor of an endpoint in this process, what it asks for, and the key that it may show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx

from serving.api.app import api_app

from .fake_servers import FakeServers
from .virtual_time import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from serving.protocol.endpoint_config import EndpointConfig

    Use = Callable[[httpx.AsyncClient], Awaitable[Any]]

KEY = "a-secret-of-the-tests"
LOCKED = {"MINICLUSTER_API_KEYS": f"alice:{KEY}:2"}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ONE = {"prompt": [5, 6, 7], "max_tokens": 4}


def used(
    config: EndpointConfig,
    servers: FakeServers,
    use: Use,
    environment: dict[str, str] | None = None,
    *,
    host: str = "",
) -> Any:  # noqa: ANN401
    """Let *use* talk to an endpoint in this process, whose servers take no real time."""

    async def talk() -> Any:  # noqa: ANN401
        app = api_app(config, servers, environment or {}, host=host)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await use(client)

    return run(talk())


def one(
    config: EndpointConfig,
    path: str,
    body: object = None,
    *,
    servers: FakeServers | None = None,
    headers: dict[str, str] | dict[bytes, bytes] | None = None,
    environment: dict[str, str] | None = None,
) -> httpx.Response:
    """Send one request: GET without a body."""

    async def use(client: httpx.AsyncClient) -> httpx.Response:
        if body is None:
            return await client.get(path, headers=headers)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=raw, headers=headers)

    answer: httpx.Response = used(config, servers or FakeServers(), use, environment)
    return answer
