"""A visitor of an endpoint in this process, what it asks for, and the key that it may show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from serving.protocol.messages import EndpointConfig

from .endpoint_app import endpoint_app
from .fake_servers import FakeServers
from .virtual_time import run

KEY = "a-secret-of-the-tests"
LOCKED = {"MINICLUSTER_API_KEYS": f"alice:{KEY}:2"}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ONE = {"prompt": [5, 6, 7], "max_tokens": 4}


@asynccontextmanager
async def visiting(
    config: EndpointConfig,
    servers: FakeServers | None = None,
    environment: dict[str, str] | None = None,
    *,
    host: str = "",
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an endpoint in this process; for tests in virtual time."""
    app = endpoint_app(config, servers or FakeServers(), environment or {}, host=host)
    await asyncio.sleep(1.0)  # the clock starts at 0, which would hide a time taken for a duration
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def one(  # noqa: PLR0913
    config: EndpointConfig,
    path: str,
    body: object = None,
    *,
    servers: FakeServers | None = None,
    headers: dict[str, str] | dict[bytes, bytes] | None = None,
    environment: dict[str, str] | None = None,
    host: str = "",
) -> httpx.Response:
    """Send one request: GET without a body. Its extension `metrics` says what was counted."""

    async def ask() -> httpx.Response:
        async with visiting(config, servers, environment, host=host) as client:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            method = "GET" if raw is None else "POST"
            answer = await client.request(method, path, content=raw, headers=headers)
            counted = await client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})
            answer.extensions["metrics"] = counted.text
            return answer

    return run(ask())
