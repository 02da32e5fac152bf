"""The token channels of a replica and an endpoint, over real sockets in one process."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from serving.cluster.token import CERTIFICATES, USE_TLS, channel_tls
from serving.protocol.frames import (
    HEADER,
    MOST_CONTROL_BYTES,
    NONCE_BYTES,
    SILENT_S,
    FrameReader,
    Kind,
    frame,
    hello,
    nonce_in,
    proof,
)
from serving.protocol.messages import ChannelPlace, EngineFailed
from serving.replicas.token_channels import ChannelLostError, TokenChannels
from serving.replicas.token_listener import EARLY_FRAMES, SentAnswer, TokenListener
from serving.request.usage import EventSplitter
from tests.certificates import write_certificate
from tests.serving.virtual_time import in_virtual_time

HERE = "127.0.0.1"
DONE = "data: [DONE]\n\n"
USAGE = 'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'


class Reader:
    """What an endpoint gets of one answer."""

    def __init__(self) -> None:
        self.text = b""
        self.pieces = 0
        self.ending: dict[str, Any] | None = None
        self.error: ChannelLostError | None = None
        self.over = asyncio.Event()

    def events(self, text: bytes) -> None:
        self.text += text
        self.pieces += 1

    def ended(self, ending: dict[str, Any]) -> None:
        self.ending = ending
        self.over.set()

    def lost(self, error: ChannelLostError) -> None:
        self.error = error
        self.over.set()


class Replica:
    """A listener, the answers that it sends, and an endpoint that reads them."""

    def __init__(self, listener: TokenListener) -> None:
        self.listener = listener
        self.channels = TokenChannels(None)

    def begin(
        self, items: AsyncIterator[list[str]], *, keeps_usage: bool = False
    ) -> tuple[SentAnswer, asyncio.Task[None]]:
        stack = ExitStack()
        answer = stack.enter_context(self.listener.answering())

        async def send() -> None:
            with stack:
                async with aclosing(items):  # type: ignore[type-var]
                    await answer.send(items, EventSplitter(keeps_usage=keeps_usage))

        return answer, asyncio.create_task(send())

    def read(self, place: ChannelPlace) -> Reader:
        reader = Reader()
        self.channels.attach(place, reader)
        return reader


async def _tick() -> None:
    """Have the clock go in small steps: what is under way between sockets takes time."""
    while True:  # noqa: ASYNC110  (there is nothing to wait for)
        await asyncio.sleep(0.01)


@asynccontextmanager
async def ticking() -> AsyncIterator[None]:
    ticker = asyncio.create_task(_tick())
    try:
        yield
    finally:
        await asyncio.sleep(0.1)  # what was cut is closed
        ticker.cancel()


@asynccontextmanager
async def listening() -> AsyncIterator[Replica]:
    async with ticking():
        listener = TokenListener()
        await listener.listen(HERE, None)
        replica = Replica(listener)
        try:
            yield replica
        finally:
            replica.channels.close()
            listener.close()


async def steps(*texts: str, pause_s: float = 0.0) -> AsyncIterator[list[str]]:
    for text in texts:
        yield [text]
        await asyncio.sleep(pause_s)


def tokens(count: int, name: str = "t") -> list[str]:
    return [f"data: {name}{number}\n\n" for number in range(count)]


@in_virtual_time
@pytest.mark.parametrize("keeps_usage", [False, True])
async def test_many_answers_come_whole_on_one_connection(*, keeps_usage: bool) -> None:
    """Their events in order, then usage and end; usage stays in for clients that ask for it."""
    async with listening() as replica:
        begun = [
            replica.begin(
                steps(*tokens(40, f"a{number}-"), USAGE, DONE, pause_s=0.01),
                keeps_usage=keeps_usage,
            )
            for number in range(20)
        ]
        readers = [replica.read(answer.place) for answer, _ in begun]
        await asyncio.gather(*(reader.over.wait() for reader in readers))
        await asyncio.gather(*(sending for _, sending in begun))
        for number, reader in enumerate(readers):
            assert reader.text.decode() == "".join(tokens(40, f"a{number}-"))
            text = USAGE + DONE if keeps_usage else DONE
            assert reader.ending == {"usage": {"completion_tokens": 3}, "text": text, "error": ""}
        assert not replica.listener.answers


@in_virtual_time
async def test_events_wait_for_an_endpoint_that_asks_late() -> None:
    """However many there are; the engine is read as far as there is room. Nobody: it is left."""
    async with listening() as replica:
        taken = 0

        async def counted() -> AsyncIterator[list[str]]:
            nonlocal taken
            for text in tokens(2 * EARLY_FRAMES):
                taken += 1
                yield [text]

        answer, sending = replica.begin(counted())
        never, unasked = replica.begin(steps(*tokens(3)))
        await asyncio.sleep(5.0)
        assert taken == EARLY_FRAMES
        reader = replica.read(answer.place)
        await reader.over.wait()
        assert reader.text.decode() == "".join(tokens(2 * EARLY_FRAMES))
        await asyncio.sleep(60.0)
        assert sending.done()
        assert unasked.done()
        late = replica.read(never.place)
        await late.over.wait()
        assert late.ending is not None
        assert "no such answer" in late.ending["error"]


@in_virtual_time
async def test_events_are_joined_where_the_endpoint_falls_behind() -> None:
    """What one read brings of an answer is one piece for its client."""
    async with listening() as replica:
        answer, _ = replica.begin(steps(*tokens(100)))
        await asyncio.sleep(1.0)
        reader = replica.read(answer.place)
        await reader.over.wait()
        assert reader.text.count(b"data: ") == 100
        assert reader.pieces < 10


@in_virtual_time
async def test_an_engine_that_fails_ends_its_answer_alone() -> None:
    async def failing() -> AsyncIterator[list[str]]:
        yield ["data: 1\n\n"]
        await asyncio.sleep(1.0)
        raise EngineFailed("it is dead")

    async with listening() as replica:
        broken, sending = replica.begin(failing())
        other, _ = replica.begin(steps(*tokens(9), pause_s=1.0))
        readers = [replica.read(each.place) for each in (broken, other)]
        await asyncio.gather(*(reader.over.wait() for reader in readers))
        assert readers[0].ending is not None
        assert (readers[0].text, readers[0].ending["error"]) == (b"data: 1\n\n", "it is dead")
        assert readers[1].ending is not None
        assert (readers[1].text.count(b"data"), readers[1].ending["error"]) == (9, "")
        with pytest.raises(EngineFailed):
            await sending


@in_virtual_time
async def test_a_client_that_stands_still_holds_up_its_own_answer_alone() -> None:
    async with listening() as replica:
        begun = [replica.begin(steps(*tokens(50), pause_s=0.1))[0].place for _ in range(2)]
        slow, quick = (replica.read(place) for place in begun)
        await asyncio.sleep(1.0)
        replica.channels.tell(begun[0], Kind.HOLD)
        await quick.over.wait()
        held = slow.text.count(b"data")
        assert held < 20
        await asyncio.sleep(100.0)
        assert slow.text.count(b"data") == held
        replica.channels.tell(begun[0], Kind.GO_ON)
        await slow.over.wait()
        assert slow.text == quick.text


@in_virtual_time
async def test_a_client_that_leaves_ends_the_reading_of_its_engine() -> None:
    """And so does an endpoint that is gone, for all of its answers."""
    closed = []

    async def endless(name: str) -> AsyncIterator[list[str]]:
        try:
            while True:
                yield ["data: 1\n\n"]
                await asyncio.sleep(0.1)
        finally:
            closed.append(name)

    async with listening() as replica:
        items = {name: endless(name) for name in ("left", "cut")}
        begun = {name: replica.begin(each) for name, each in items.items()}
        readers = {name: replica.read(answer.place) for name, (answer, _) in begun.items()}
        await asyncio.sleep(1.0)
        replica.channels.tell(begun["left"][0].place, Kind.DETACH)
        await begun["left"][1]
        before = readers["left"].text
        await asyncio.sleep(1.0)
        assert (readers["left"].text, readers["cut"].error) == (before, None)
        _cut(begun["cut"][0])
        await begun["cut"][1]
        await readers["cut"].over.wait()
        assert "lost" in str(readers["cut"].error)
        await asyncio.sleep(1.0)
        assert sorted(closed) == ["cut", "left"]
        assert not replica.listener.answers
        again, _ = replica.begin(steps(*tokens(2)))  # a new connection is made
        reader = replica.read(again.place)
        await reader.over.wait()
        assert reader.text == b"data: t0\n\ndata: t1\n\n"


def _cut(answer: SentAnswer) -> None:
    """Cut the connection of an answer, as a network does."""
    connection = answer.connection
    assert connection is not None
    connection.transport.abort()


async def _refused(
    replica: Replica, what: Callable[[bytes], bytes]
) -> tuple[bytes, asyncio.StreamWriter]:
    """Return what the replica sends to a peer that answers its greeting with *what*."""
    with replica.listener.answering() as answer:
        receiving, sending = await asyncio.open_connection(HERE, answer.place.port)
    size = HEADER.size + len(hello(bytes(NONCE_BYTES)))
    [(_, _, greeting)] = FrameReader(99).feed(await receiving.readexactly(size))
    sending.write(what(nonce_in(greeting)))
    try:
        return await asyncio.wait_for(receiving.read(), 60.0), sending
    except ConnectionResetError:
        return b"", sending


MINE = bytes(NONCE_BYTES)


@in_virtual_time
@pytest.mark.parametrize(
    ("what", "named"),
    [
        (lambda _nonce: frame(Kind.HELLO, 0, hello(MINE) + bytes(32)), "proof is wrong"),
        (lambda _nonce: frame(Kind.HELLO, 0, hello(MINE)), "proof is wrong"),
        (lambda _nonce: frame(Kind.ATTACH, 1), "before the greeting"),
        (lambda _nonce: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "expected kinds"),
        (lambda _nonce: HEADER.pack(MOST_CONTROL_BYTES + 1, 0, Kind.HELLO), "at most"),
        (lambda _nonce: b"\x00", "no proof came in time"),
        (
            lambda _nonce: frame(
                Kind.HELLO, 0, hello(MINE).replace(b"\x00\x01", b"\x00\x09", 1) + bytes(32)
            ),
            "version 9; expected 1",
        ),
    ],
    ids=["wrong", "none", "early", "http", "long", "silent", "version"],
)
async def test_strangers_are_shut_out_and_named(
    caplog: pytest.LogCaptureFixture, what: Callable[[bytes], bytes], named: str
) -> None:
    """Their connections are closed, without a word to them; answers under way go on."""
    async with listening() as replica:
        answer, _ = replica.begin(steps(*tokens(100), pause_s=1.0))
        reader = replica.read(answer.place)
        await asyncio.sleep(1.0)
        with caplog.at_level(logging.WARNING):
            said, sending = await _refused(replica, what)
        sending.close()
        assert said == b""
        assert named in caplog.text
        await reader.over.wait()
        assert reader.text.decode() == "".join(tokens(100))


@in_virtual_time
async def test_an_endpoint_with_the_wrong_secret_gets_nothing() -> None:
    async with listening() as replica:
        answer, _ = replica.begin(steps(*tokens(3)))
        reader = replica.read(replace(answer.place, secret="00" * 32))
        await reader.over.wait()
        assert (reader.text, reader.ending) == (b"", None)
        assert isinstance(reader.error, ChannelLostError)


@asynccontextmanager
async def _imposter(
    act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[int]:
    opened: list[asyncio.StreamWriter] = []

    async def acting(receiving: asyncio.StreamReader, sending: asyncio.StreamWriter) -> None:
        opened.append(sending)
        await act(receiving, sending)

    async with ticking():
        server = await asyncio.start_server(acting, HERE, 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for sending in opened:
                sending.close()


SECRET = bytes(range(32))


async def _greeted(
    receiving: asyncio.StreamReader, sending: asyncio.StreamWriter, secret: bytes
) -> None:
    sending.write(frame(Kind.HELLO, 0, hello(MINE)))
    size = HEADER.size + len(hello(MINE)) + 32
    [(_, _, greeting)] = FrameReader(999).feed(await receiving.readexactly(size))
    sending.write(frame(Kind.PROOF, 0, proof(secret, b"replica", MINE, nonce_in(greeting))))


@in_virtual_time
@pytest.mark.parametrize(
    ("secret", "then", "named", "within_s"),
    [
        (bytes(32), frame(Kind.EVENTS, 7, b"forged"), "another process listens there", 1.0),
        (SECRET, b"", "no sign of life", 3 * SILENT_S),  # open on one side only
        (SECRET, frame(Kind.ATTACH, 7), "expected one that a replica sends", 1.0),
        (SECRET, frame(Kind.END, 7, b"{"), "no JSON", 1.0),
        (SECRET, HEADER.pack(1 << 30, 7, Kind.EVENTS), "at most", 1.0),
        (SECRET, frame(Kind.EVENTS, 7, b"half of a frame")[:-3], "it ended", 1.0),
    ],
    ids=["imposter", "half-open", "kind", "json", "length", "cut"],
)
async def test_a_replica_that_is_none_or_is_gone_ends_the_answer(
    secret: bytes, then: bytes, named: str, within_s: float
) -> None:
    """With a reason, and without a byte that was not proved to be the replica's."""

    async def act(receiving: asyncio.StreamReader, sending: asyncio.StreamWriter) -> None:
        await _greeted(receiving, sending, secret)
        sending.write(then)
        await sending.drain()
        if named == "it ended":
            sending.close()

    async with _imposter(act) as port:
        reader, channels = Reader(), TokenChannels(None)
        place = ChannelPlace(host=HERE, port=port, secret=SECRET.hex(), answer=7)
        channels.attach(place, reader)
        async with asyncio.timeout(within_s):
            await reader.over.wait()
        channels.close()
        assert reader.text == b""
        assert named in str(reader.error)


@in_virtual_time
async def test_a_replica_that_cannot_be_reached_ends_the_answer() -> None:
    async def act(*_: object) -> None:
        """Say nothing."""

    async with _imposter(act) as port:
        pass
    reader = Reader()
    place = ChannelPlace(host=HERE, port=port, secret=SECRET.hex(), answer=1)
    async with ticking():
        TokenChannels(None).attach(place, reader)
        await reader.over.wait()
    assert "cannot connect" in str(reader.error)


async def _read_over(listens: ssl.SSLContext | None, calls: ssl.SSLContext | None) -> Reader:
    listener, channels, reader = TokenListener(), TokenChannels(calls), Reader()
    await listener.listen(HERE, listens)
    replica = Replica(listener)
    answer, sending = replica.begin(steps(*tokens(5)))
    channels.attach(answer.place, reader)
    async with asyncio.timeout(30.0):
        await reader.over.wait()
    sending.cancel()
    channels.close()
    listener.close()
    await asyncio.sleep(0.1)
    return reader


@pytest.mark.parametrize("trusted", [True, False])
def test_tls_by_the_clusters_certificates(tmp_path: Path, *, trusted: bool) -> None:
    """Where Ray uses TLS so does a channel, and a side with another certificate is shut out."""
    mine = write_certificate(tmp_path / "mine.pem", HERE)
    theirs = mine if trusted else write_certificate(tmp_path / "theirs.pem", HERE)

    def context(own: Path, *, listens: bool) -> ssl.SSLContext | None:
        environ = {USE_TLS: "1", **dict.fromkeys(CERTIFICATES, str(own))}
        return channel_tls(environ, listens=listens)

    reader = uvloop.run(_read_over(context(mine, listens=True), context(theirs, listens=False)))
    assert reader.text.count(b"data") == (5 if trusted else 0)
    assert (reader.error is None) == trusted


def test_without_tls_in_the_loop_of_ray() -> None:
    assert channel_tls({}, listens=True) is None
    assert uvloop.run(_read_over(None, None)).text.count(b"data") == 5


@in_virtual_time
async def test_very_long_events_arrive() -> None:
    """What an engine gives at once may be longer than a frame."""
    text = f"data: {'x' * 9_000_000}\n\n"
    async with listening() as replica:
        answer, _ = replica.begin(steps(text))
        other, _ = replica.begin(steps(*tokens(9), pause_s=0.1))
        readers = [replica.read(each.place) for each in (answer, other)]
        await asyncio.gather(*(reader.over.wait() for reader in readers))
        assert [readers[0].text, readers[1].text.count(b"data")] == [text.encode(), 9]


@in_virtual_time
async def test_a_reader_that_fails_is_dropped_alone() -> None:
    class Failing(Reader):
        def events(self, text: bytes) -> None:
            raise ZeroDivisionError(text)

    async with listening() as replica:
        broken, sending = replica.begin(steps(*tokens(50), pause_s=0.1))
        other, _ = replica.begin(steps(*tokens(50), pause_s=0.1))
        replica.channels.attach(broken.place, Failing())
        reader = replica.read(other.place)
        await reader.over.wait()
        assert reader.text.count(b"data") == 50
        assert sending.done()
