"""The endpoint's own server: answers, clients that disconnect, and its port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from serving.api.server import HttpLimits, HttpServer
from serving.api.tls import TlsFiles, trusting
from tests.certificates import write_certificate
from tests.serving.command import taken_port
from tests.serving.raw_http import (
    HOST,
    LIMIT_S,
    POST,
    QUICK,
    Connection,
    Server,
    listening,
    on_uvloop,
)


@pytest.fixture
def both(tmp_path: Path) -> TlsFiles:
    """Return a file that holds a certificate and its key."""
    file = str(write_certificate(tmp_path / "both.pem", HOST))
    return TlsFiles(cert=file, key=file)


@on_uvloop
@pytest.mark.parametrize("size", [0, 10, 1 << 20])
async def test_bodies_arrive_whole_and_connections_are_used_again(size: int) -> None:
    """Also ones of many parts, and after a header of 60 kB."""
    async with listening() as (_, client):
        first = await client.post("/echo", content=b"x" * size)
        second = await client.post("/echo", content=b"ab", headers={"X": "x" * 60_000})
        assert [each.json()["size"] for each in (first, second)] == [size, 2]
        assert first.json()["port"] == second.json()["port"]


@on_uvloop
async def test_the_client_is_the_one_that_connected() -> None:
    """A header that proxies set could name any other one, in the access log too."""
    async with listening() as (_, client):
        answer = await client.post("/echo", headers={"X-Forwarded-For": "203.0.113.9"})
        assert answer.json()["host"] == HOST


@on_uvloop
@pytest.mark.parametrize("path", ["hang", "stream"])
async def test_clients_that_hang_up_end_the_work(path: str) -> None:
    """Before the answer, and in the middle of it."""
    async with listening() as (server, client):
        asking = asyncio.create_task(client.post(path))
        await asyncio.wait_for(server.begun.wait(), LIMIT_S)
        assert not server.cancelled.is_set()
        asking.cancel()
        await asyncio.wait_for(server.cancelled.wait(), LIMIT_S / 2)
        assert (await client.post("/echo")).status_code == 200


@on_uvloop
@pytest.mark.parametrize("path", [b"/hang", b"/stream"])
async def test_a_client_that_ends_its_side_ends_the_work(path: bytes) -> None:
    """A half-closed connection cannot be told from one that is gone: docs/operations.md says so."""
    async with listening() as (server, client), Connection(server.port) as one:
        one.writer.write(POST.replace(b"/echo", path) + b"\r\n")
        await asyncio.wait_for(server.begun.wait(), LIMIT_S)
        assert not server.cancelled.is_set()
        one.writer.write_eof()
        await asyncio.wait_for(server.cancelled.wait(), LIMIT_S / 2)
        assert await asyncio.wait_for(one.reader.read(), LIMIT_S / 2) == b"" or path == b"/stream"
        assert (await client.post("/echo")).status_code == 200


@on_uvloop
async def test_an_exception_is_a_500_without_details() -> None:
    """The endpoint answers its own; this is for what it did not foresee."""
    async with listening() as (_, client):
        answer = await client.post("/fail")
        assert (answer.status_code, answer.text) == (500, "Internal Server Error")


def test_a_taken_port_is_an_error_at_once() -> None:
    """Ray Serve then starts the replica again."""
    with taken_port(HOST) as port, pytest.raises(OSError, match="in use"):
        HttpServer(Starlette(), HOST, int(port))


@on_uvloop
@pytest.mark.parametrize("value", [b"\x00", b"forged\rline"], ids=["NUL", "line"])
async def test_a_header_with_control_characters_ends_nothing_but_its_request(value: bytes) -> None:
    """It is refused, and the server answers the next request."""
    async with listening() as (server, client):
        reader, writer = await asyncio.open_connection(HOST, server.port)
        with closing(writer):
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + value)
            writer.write(b"\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"400"
        assert (await client.post("/echo")).status_code == 200


HALF_A_BODY = POST + b"Content-Length: 9\r\n\r\nhalf"


@on_uvloop
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"POST", b"408"),
        (POST, b"408"),
        (HALF_A_BODY, b"408"),
        (b"GET /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf", b"405"),
        (POST + b"Content-Length: 1\r\n\r\nx" + POST, b"200"),
        (POST + b"X: " + b"x" * 70_000, b"400"),
        (POST + b"x: y\r\n" * 200 + b"\r\n", b"431"),
        (b"\x16\x03\x01 no HTTP\r\n\r\n", b"400"),
    ],
    ids=[
        *("nothing", "half a line", "half of the headers", "half a body", "refused midway"),
        *("half of a second one", "long header", "many headers", "no HTTP"),
    ],
)
async def test_requests_that_do_not_end_are_closed(sent: bytes, status: bytes) -> None:
    """With an answer where one is possible; what one byte more would help is not waited for."""
    async with listening(QUICK) as (server, client), Connection(server.port) as one:
        answer = await one.says(sent)
        assert answer.partition(b" ")[2][:3] == status
        own = status in {b"400", b"408", b"431"}
        if own:
            assert server.counted == [int(status)]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert (await client.post("/echo")).status_code == 200


@on_uvloop
async def test_a_body_that_drips_is_late_all_the_same() -> None:
    """Each byte is news, and none gives the request more time."""
    async with listening(QUICK) as (server, _), Connection(server.port) as one:
        one.writer.write(POST + b"Content-Length: 9000\r\n\r\n")
        while not one.reader.at_eof() and not one.writer.is_closing():
            one.writer.write(b"x")
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(one.reader.read(100), 0.05)


@on_uvloop
@pytest.mark.parametrize(("connections", "files"), [(10, 10_000), (1000, 20)])
async def test_connections_beyond_the_limit_close_the_longest_idle_ones(
    monkeypatch: pytest.MonkeyPatch, connections: int, files: int
) -> None:
    """
    Those that ask are answered, and an answer under way goes on.

    The process keeps half of its files for itself, and raises their number first.
    """
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, files))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    limits = HttpLimits(connections=connections)
    async with listening(limits) as (server, client), AsyncExitStack() as stack:
        assert raised == [(files, files)]
        asking = asyncio.create_task(client.post("/hang"))
        await server.begun.wait()
        silent = [await stack.enter_async_context(Connection(server.port)) for _ in range(30)]
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}") as other:
            assert (await other.post("/echo")).status_code == 200
        assert await silent[0].says(b"") == b""  # closed
        assert not server.cancelled.is_set()
        asking.cancel()


@on_uvloop
@pytest.mark.parametrize("tls", [False, True], ids=["HTTP", "HTTPS"])
async def test_a_client_that_stops_reading_is_cut(tls: bool, both: TlsFiles) -> None:  # noqa: FBT001
    """The work for it ends; one that reads slowly gets all."""
    context = trusting(both.cert) if tls else None
    async with (
        listening(QUICK, both if tls else None) as (server, _),
        Connection(server.port, context=context) as slow,
    ):
        slow.writer.write(b"POST /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(20):
            assert len(await slow.reader.readexactly(1 << 20))
            await asyncio.sleep(QUICK.send_s / 4)
        assert not server.cancelled.is_set()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(server.cancelled.wait(), LIMIT_S)


def _halve(file: str) -> None:
    whole = Path(file).read_bytes()
    Path(file).write_bytes(whole[: len(whole) // 2])


@on_uvloop
async def test_a_certificate_is_read_again_when_it_changes(both: TlsFiles) -> None:
    """New connections get the new one; half of a new one changes nothing."""

    async def presented(server: Server) -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        async with Connection(server.port, context=context) as one:
            one.writer.write(POST + b"Content-Length: 1\r\n\r\nx")
            assert (await one.reader.readline()).split()[1] == b"200"
            found: bytes = one.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return found

    async with listening(tls=both) as (server, _):
        first = await presented(server)
        _halve(both.cert)
        await server.listener.reload_certificate()
        assert await presented(server) == first
        write_certificate(Path(both.cert), HOST)
        await server.listener.reload_certificate()
        assert await presented(server) != first


@on_uvloop
async def test_handshakes_that_do_not_end_are_closed(both: TlsFiles) -> None:
    """They count as connections, and neither they nor plain HTTP stop others."""
    limits = replace(QUICK, connections=5)
    async with listening(limits, both) as (server, _), AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(Connection(server.port)) for _ in range(20)]
        context = trusting(both.cert)
        async with Connection(server.port, context=context) as one:
            one.writer.write(POST + b"Content-Length: 1\r\n\r\nx")
            assert (await one.reader.readline()).split()[1] == b"200"
        assert {await each.says(b"") for each in silent} == {b""}
        async with Connection(server.port) as plain:
            assert await plain.says(POST + b"\r\n") == b""
