"""What the endpoint's server parses, how much of it at a time, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import h11
import pytest

from serving.api.server import (
    FREE_CHUNKS,
    LEAST_CHUNK_BYTES,
    LINGER_BYTES,
    MAX_HEADERS,
    PAST_BYTES,
    PIECE_BYTES,
    HttpLimits,
    RequestParser,
)
from serving.api.tls import TlsFiles, trusting
from tests.certificates import write_certificate
from tests.serving.raw_http import HOST, LIMIT_S, POST, QUICK, Connection, listening, on_uvloop

CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: 14\r\n"
BODY = b'{\n "a":\r\n "b"}'  # lines that no header may have
CHUNKS = b"5\r\n%s\r\n9;x=y\r\n%s\r\n" % (BODY[:5], BODY[5:])
TINY = b"1\r\nx\r\n"
TRAILER = b"X: " + b"y" * 95 + b"\r\n"


def body(chunk: bytes, count: int) -> bytes:
    return CHUNKED + b"\r\n" + (b"%x\r\n%s\r\n" % (len(chunk), chunk)) * count + b"0\r\n\r\n"


REQUESTS = {
    "length": (POST + LENGTH + b"\r\n" + BODY, 200),
    "chunks": (POST + CHUNKED + b"\r\n" + CHUNKS + b"0\r\n\r\n", 200),
    "trailers": (POST + CHUNKED + b"\r\n" + CHUNKS + b"00;x\r\nX: y\r\nY: z\r\n\r\n", 200),
    "length, then chunks": (POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS + b"0\r\n\r\n", 400),
    "chunks, then length": (POST + CHUNKED.upper() + LENGTH + b"\r\n" + BODY, 400),
    **{
        f"length {value!r}": (POST + b"Content-Length: %b\r\n\r\n" % value + BODY, 400)
        for value in (b"+14", b"-1", b"0x0e", b"14, 14", b"14,", b"1 4", b"\xb2", b"9" * 30, b"")
    },
    "two lengths": (POST + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY, 400),
    "one length twice": (POST + LENGTH + LENGTH.lower() + b"\r\n" + BODY, 400),
    "blank before the colon": (POST + b"Content-Length : 14\r\n\r\n" + BODY, 400),
    **{
        f"coding {value!r}": (POST + b"Transfer-Encoding: %b\r\n\r\n" % value + CHUNKS, 400)
        for value in (
            b"xchunked",
            b"identity",
            b"gzip, chunked",
            b"chunked, chunked",
            b"\x0bchunked",
        )
    },
    "coding twice": (POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS, 400),
    "chunks in HTTP/1.0": (POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS, 400),
    **{
        f"chunk {head!r}": (
            POST + CHUNKED + b"\r\n" + head + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
            400,
        )
        for head in (b"0xe", b"+e", b"-1", b"", b"e;x\n", b"0" * 20 + b"e", b" e")
    },
    "chunk without an end": (POST + CHUNKED + b"\r\n4\r\n" + BODY + b"\r\n0\r\n\r\n", 400),
    "HTTP/2.0": (POST.replace(b"1.1", b"2.0") + LENGTH + b"\r\n" + BODY, 400),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/1.7": (POST.replace(b"1.1", b"1.7") + LENGTH + b"\r\n" + BODY, 200),
    "no host": (b"POST /echo HTTP/1.1\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "two hosts": (POST + b"Host: y\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "line without a colon": (POST + b"abc\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "blank before the headers": (POST.replace(b"Host", b" Host") + LENGTH + b"\r\n" + BODY, 400),
    "blank line first": (b"\r\n" + POST + LENGTH + b"\r\n" + BODY, 200),
    "two blank lines first": (b"\r\n\r\n" + POST + LENGTH + b"\r\n" + BODY, 400),
    "LF first": (b"\n" + POST + LENGTH + b"\r\n" + BODY, 400),
    "CR first": (b"\r" + POST + LENGTH + b"\r\n" + BODY, 400),
    "with its host": (POST.replace(b"/echo", b"http://y/echo") + LENGTH + b"\r\n" + BODY, 200),
    "lines with LF": (POST.replace(b"\r", b"") + LENGTH.replace(b"\r", b"") + b"\n" + BODY, 400),
    "one line with LF": (POST + b"X: y\n" + LENGTH + b"\r\n" + BODY, 400),
    "blank line with LF": (POST + LENGTH + b"\n" + BODY, 400),
    "folded length": (POST + b"Content-Length:\r\n 14\r\n\r\n" + BODY, 400),
    "folded chunks": (POST + b"Transfer-Encoding:\r\n\tchunked\r\n\r\n" + CHUNKS, 400),
    "folded line": (POST + b"X: y\r\n z\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "last chunk with LF": (POST + CHUNKED + b"\r\n" + CHUNKS + b"0\r\n\n", 400),
    "trailer with LF": (POST + CHUNKED + b"\r\n" + CHUNKS + b"0\r\nX: y\n\r\n", 400),
    "folded trailer": (POST + CHUNKED + b"\r\n" + CHUNKS + b"0\r\nX: y\r\n z\r\n\r\n", 400),
    "trailers of 4 kB": (POST + CHUNKED + b"\r\n0\r\n" + TRAILER * 40 + b"\r\n", 200),
    "trailers of 9 kB": (POST + CHUNKED + b"\r\n0\r\n" + TRAILER * 90 + b"\r\n", 400),
    "110 trailers": (POST + CHUNKED + b"\r\n0\r\n" + b"X: y\r\n" * 110 + b"\r\n", 431),
    "long chunk head": (POST + CHUNKED + b"\r\n5;" + b"x" * 3 * PIECE_BYTES + b"\r\n", 400),
    "100 headers": (POST + b"x: y\r\n" * (MAX_HEADERS - 1) + b"\r\n", 200),
    "101 headers": (POST + b"x: y\r\n" * MAX_HEADERS + b"\r\n", 431),
    "short chunks": (POST + body(b"x", FREE_CHUNKS), 200),
    "too many short chunks": (POST + body(b"x", FREE_CHUNKS + 1), 400),
    "chunks that are long enough": (POST + body(b"x" * LEAST_CHUNK_BYTES, 400), 200),
    "chunks that are nearly so": (POST + body(b"x" * (LEAST_CHUNK_BYTES - 1), 400), 400),
}


def parsed(*parts: bytes) -> int:
    """Return the status of a request that comes in *parts*, as far as the parser decides it."""
    parser, read = RequestParser(64 << 10), b""
    try:
        for part in parts:
            parser.receive_data(part)
            parser.events_left = 10_000
            while not isinstance(event := parser.next_event(), type):
                if isinstance(event, h11.EndOfMessage):
                    assert read in {BODY, b""} or not read.strip(b"x")
                    return 200
                read += getattr(event, "data", b"")
    except h11.RemoteProtocolError:
        return parser.refusal.status
    return 408


@pytest.mark.parametrize("name", REQUESTS)
def test_the_parts_in_which_a_request_comes_change_nothing(name: str) -> None:
    """Whole, cut at any byte, or byte by byte: it is read or refused all the same."""
    sent, status = REQUESTS[name]
    assert parsed(sent) == status
    step = 1 + len(sent) // 200
    for cut in range(1, len(sent), step):
        assert parsed(sent[:cut], sent[cut:]) == status
    assert parsed(*(sent[at : at + step] for at in range(0, len(sent), step))) == status


@on_uvloop
async def test_what_is_refused_is_answered_and_ends_its_connection() -> None:
    """In OpenAI's shape; what follows it is no request, and the server can stop meanwhile."""
    async with AsyncExitStack() as stack, listening(replace(QUICK, linger_s=0.05)) as (server, _):

        async def refused(name: str, sent: bytes, status: int) -> None:
            one = await stack.enter_async_context(Connection(server.port))
            head, _, body = (await one.says(sent + POST + b"\r\n")).partition(b"\r\n\r\n")
            assert head.split()[1] == str(status).encode(), name
            assert json.loads(body)["error"]["type"] == "invalid_request_error", name

        wrong = {name: given for name, given in REQUESTS.items() if given[1] != 200}
        await asyncio.gather(*(refused(name, *given) for name, given in wrong.items()))
        assert sorted(server.counted) == sorted(status for _, status in wrong.values())
        async with Connection(server.port) as other:
            other.writer.write(POST + b"Connection: close\r\n\r\n")
            assert (await other.reader.readline()).split()[1] == b"200"


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"/echo?a=b", "/echo", "x"),
        (b"http://y/echo", "/echo", "y"),
        (b"HTTP://y:80/echo?a=b", "/echo", "y:80"),
        (b"https://[::1]/echo", "/echo", "[::1]"),
        (b"http://evil.example", "/", "evil.example"),
        (b"http://evil.example?x", "/", "evil.example"),
        (b"//evil.example/echo", "//evil.example/echo", "x"),
    ],
)
def test_a_host_in_the_target_is_the_one_that_is_checked(
    target: bytes, path: str, host: str
) -> None:
    """What a client sends to a proxy; the application sees the path, and this host alone."""
    parser = RequestParser(1 << 16)
    parser.events_left = 1
    parser.receive_data(POST.replace(b"/echo", target) + b"\r\n")
    event = parser.next_event()
    assert isinstance(event, h11.Request)
    assert event.target.partition(b"?")[0].decode() == path
    assert [value for name, value in event.headers if name == b"host"] == [host.encode()]


@on_uvloop
async def test_clients_that_end_their_bodies_with_a_line_are_answered_again() -> None:
    async with listening(QUICK) as (server, _), Connection(server.port) as one:
        whole = POST + LENGTH + b"\r\n" + BODY + b"\r\n"
        answers = await one.says(whole * 3 + POST + b"Connection: close\r\n\r\n")
        assert answers.count(b"HTTP/1.1 200") == 4


@on_uvloop
@pytest.mark.parametrize("path", [b"POST /echo", b"POST /nope", b"GET /echo"])
async def test_bodies_in_tiny_chunks_stop_nobody(path: bytes) -> None:
    """Beside ten clients that send nothing else, all requests of others are answered."""
    statuses, refused = set(), asyncio.Event()

    async def flood(port: int) -> None:
        while True:
            async with Connection(port) as one:
                head = path + b" HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n"
                statuses.add((await one.says(head + TINY * 20_000)).split()[1])
                refused.set()

    async with listening() as (server, client):
        floods = [asyncio.create_task(flood(server.port)) for _ in range(10)]
        answers = [await client.post("/echo", content=b"ab") for _ in range(20)]
        await refused.wait()
        for each in floods:
            each.cancel()
        ended = await asyncio.gather(*floods, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    assert [each.json()["size"] for each in answers] == [2] * 20
    assert statuses <= {b"400", b"404", b"405"}


@on_uvloop
@pytest.mark.parametrize(
    "chunks_bytes",
    [[LEAST_CHUNK_BYTES] * 30_000, [4096] * 4000, [70_000, *[1] * 200] * 100],
    ids=["short", "long", "one long, 200 tiny"],
)
async def test_others_have_their_turn_while_many_chunks_are_parsed(
    monkeypatch: pytest.MonkeyPatch, chunks_bytes: list[int]
) -> None:
    """However fast they come: some at a time, and little more is read before they are parsed."""
    turns, kept_bytes = 0, []
    received = RequestParser.receive_data

    def receive(parser: RequestParser, data: bytes) -> None:
        received(parser, data)
        kept_bytes.append(len(parser._received))

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(RequestParser, "receive_data", receive)
    async with listening() as (server, _), Connection(server.port) as one:
        counting = asyncio.create_task(count())
        sent = b"".join(b"%x\r\n%s\r\n" % (each, b"x" * each) for each in [*chunks_bytes, 0])
        answer = await one.says(POST + CHUNKED + b"Connection: close\r\n\r\n" + sent)
        counting.cancel()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["size"] == sum(chunks_bytes)
    assert turns > len(chunks_bytes) / 50
    assert max(kept_bytes) < 1 << 19


@on_uvloop
async def test_no_more_is_read_of_a_body_than_is_asked_for() -> None:
    """What is parsed, and what nobody takes, waits with the client."""
    limits = replace(QUICK, body_s=1.0)
    async with listening(limits) as (server, _), Connection(server.port) as one:
        one.writer.write(b"POST /hang HTTP/1.1\r\nHost: x\r\n" + body(b"x" * 4096, 16_000))
        await server.begun.wait()
        await asyncio.sleep(0.5)
        assert one.writer.transport.get_write_buffer_size() > 4096 * 8_000


@on_uvloop
async def test_the_work_for_what_is_refused_midway_ends() -> None:
    async with listening() as (server, _), Connection(server.port) as one:
        answer = await one.says(b"POST /hang HTTP/1.1\r\nHost: x\r\n" + body(b"x", 300))
        assert answer.split()[1] == b"400"
        await server.cancelled.wait()


@pytest.fixture(params=[False, True], ids=["HTTP", "HTTPS"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    """Return a certificate and its key, or none for HTTP."""
    file = str(write_certificate(tmp_path / "both.pem", HOST)) if request.param else None
    return file and TlsFiles(cert=file, key=file)


REFUSED_EARLY = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@on_uvloop
async def test_a_short_body_ends_after_an_early_answer_to_it(tls: TlsFiles | None) -> None:
    """And its connection goes on."""
    context = trusting(tls.cert) if tls else None
    async with listening(tls=tls) as (server, _), Connection(server.port, context=context) as one:
        one.writer.write(REFUSED_EARLY % PAST_BYTES)
        assert (await one.reader.readline()).split()[1] == b"404"
        rest = b"x" * PAST_BYTES + POST + b"Connection: close\r\n\r\n"
        assert b"HTTP/1.1 200 OK" in await one.says(rest)


@on_uvloop
@pytest.mark.parametrize(("linger_s", "endless"), [(LIMIT_S, False), (LIMIT_S, True), (0.3, True)])
@pytest.mark.parametrize(
    "sent", [REFUSED_EARLY % (1 << 40) + b"x" * (1 << 20), POST + CHUNKED + b"\r\n" + TINY * 1000]
)
async def test_a_client_may_send_on_for_a_while_to_read_its_answer_then(
    tls: TlsFiles | None, sent: bytes, linger_s: float, *, endless: bool
) -> None:
    """The rest of a long body that was answered early, and of what is refused, is not parsed."""
    context, enough_bytes, taken_bytes = trusting(tls.cert) if tls else None, LINGER_BYTES // 2, 0
    async with (
        listening(HttpLimits(linger_s=linger_s), tls) as (server, _),
        Connection(server.port, context=context) as one,
    ):
        one.writer.write(sent)
        assert (await one.reader.readline()).split()[1] in {b"400", b"404"}
        if not tls:
            assert b"HTTP/1.1" not in await one.reader.read()  # to its end, which comes at once
        with contextlib.suppress(ConnectionError):
            while taken_bytes < enough_bytes or endless:
                one.writer.write(b"x" * (1 << 20))
                await one.writer.drain()
                taken_bytes += 1 << 20
        assert taken_bytes >= enough_bytes or linger_s < LIMIT_S
