"""Streams on real connections: past ASGI where clients keep up, whole where they do not."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvloop

from serving.api.server import HttpServer
from serving.api.tls import TlsFiles
from serving.cluster.ports import free_ports
from serving.protocol.messages import EndpointConfig
from tests.certificates import write_certificate
from tests.serving.endpoint_app import endpoint_app
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import ONE

HOST = "127.0.0.1"
TOKENS = 200
BODY = {**ONE, "max_tokens": TOKENS, "stream": True}


@asynccontextmanager
async def endpoint(
    config: EndpointConfig, servers: FakeServers, tls: TlsFiles | None = None
) -> AsyncIterator[int]:
    [port] = free_ports(1)
    app = endpoint_app(config, servers, {"MINICLUSTER_ADMISSION": "off"})
    server = HttpServer(app, HOST, port, tls=tls)
    serving = asyncio.create_task(server.serve())
    try:
        yield port
    finally:
        server.stop()
        await serving


def texts(answer: str) -> list[str]:
    *events, done = [each for each in answer.split("\n\n") if each]
    assert done == "data: [DONE]"
    return [json.loads(event[6:])["choices"][0]["text"] for event in events]


WHOLE = [f" t{number}" for number in range(TOKENS)]


@pytest.mark.parametrize("secure", [False, True])
def test_streams_come_whole_and_their_connections_are_used_again(
    config: EndpointConfig, tmp_path: Path, *, secure: bool
) -> None:
    """Also where many share the endpoint, and where two follow each other on one connection."""
    pem = write_certificate(tmp_path / "both.pem", HOST)
    tls = TlsFiles(cert=str(pem), key=str(pem)) if secure else None

    async def ask() -> None:
        async with endpoint(config, FakeServers(itl_s=0.001), tls) as port:
            url = f"http{'s' if secure else ''}://{HOST}:{port}/v1/completions"
            limits = httpx.Limits(max_connections=4)
            async with httpx.AsyncClient(verify=False, limits=limits, timeout=60) as client:  # noqa: S501
                answers = await asyncio.gather(*(client.post(url, json=BODY) for _ in range(12)))
                whole = await client.post(url, json={**BODY, "stream": False})
        assert [texts(answer.text) for answer in answers] == [WHOLE] * 12
        assert whole.json()["choices"][0]["text"] == "".join(WHOLE)

    uvloop.run(ask())


async def _sent_raw(port: int, version: str, *, slowly: bool) -> bytes:
    """Return all that the endpoint sends on one connection, read *slowly* or at once."""
    raw = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.setblocking(False)  # noqa: FBT003  (positional only)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (HOST, port))
        length = f"Content-Length: {len(raw)}\r\nContent-Type: application/json\r\n\r\n"
        await loop.sock_sendall(client, f"{head}{length}".encode() + raw)
        received = b""
        while part := await loop.sock_recv(client, 512 if slowly else 65536):
            received += part
            if slowly and len(received) < 10_000:
                await asyncio.sleep(0.02)
        return received


@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_of_any_pace_and_version_gets_every_event_once(
    config: EndpointConfig, version: str, *, slowly: bool
) -> None:
    """Chunks are for HTTP/1.1 alone; what a slow client has yet to read keeps its place."""

    async def ask() -> bytes:
        async with endpoint(config, FakeServers(itl_s=0.0)) as port:
            return await _sent_raw(port, version, slowly=slowly)

    head, _, body = uvloop.run(ask()).partition(b"\r\n\r\n")
    chunked = b"transfer-encoding: chunked" in head.lower()
    assert chunked == (version == "1.1")
    text = "".join(_dechunked(body)) if chunked else body.decode()
    assert texts(text) == WHOLE


def _dechunked(body: bytes) -> list[str]:
    pieces = []
    while body:
        size = re.match(rb"([0-9a-f]+)\r\n", body)
        assert size is not None, body[:80]
        begin, length = size.end(), int(size[1], 16)
        pieces.append(body[begin : begin + length].decode())
        assert body[begin + length : begin + length + 2] == b"\r\n"
        body = body[begin + length + 2 :]
        if length == 0:
            assert body == b""
    return pieces
