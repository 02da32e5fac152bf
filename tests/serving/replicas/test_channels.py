"""The channels between processes: both ends, over real sockets in one process."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from serving.cluster.token import CERTIFICATES, USE_TLS, channel_tls
from serving.protocol.messages import (
    HEADER,
    MOST_STRANGER_BYTES,
    NONCE_BYTES,
    SILENT_S,
    ChannelPlace,
    EngineFailed,
    FrameReader,
    Kind,
    Refusal,
    frame,
    hello,
    nonce_in,
    proof,
)
from serving.replicas import channels
from serving.replicas.channels import (
    CONNECT_S,
    MOST_ERROR,
    MOST_STRANGERS,
    Call,
    CallListener,
    Channel,
    ChannelLostError,
    ServedCall,
    whole,
)
from serving.replicas.seats import Channels
from tests.certificates import write_certificate
from tests.serving.virtual_time import in_virtual_time, ticking

HERE = "127.0.0.1"
USAGE = {"completion_tokens": 3}


class Reader:
    """What a caller gets of one call after its beginning."""

    def __init__(self) -> None:
        self.text = b""
        self.pieces = 0
        self.ending: dict[str, Any] | None = None
        self.error: ChannelLostError | None = None
        self.over = asyncio.Event()

    @property
    def count(self) -> int:
        return self.text.count(b"data: ")

    def events(self, text: bytes) -> None:
        self.text += text
        self.pieces += 1

    def ended(self, ending: dict[str, Any]) -> None:
        self.ending = ending
        self.over.set()

    def lost(self, error: ChannelLostError) -> None:
        self.error = error
        self.over.set()


def tokens(count: int, name: str = "t") -> list[bytes]:
    return [b"data: %s%d\n\n" % (name.encode(), number) for number in range(count)]


class Process:
    """Answers calls: streams, results, errors and what never ends; *cancelled* are those ended."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.sent: dict[str, int] = {}
        self.noticed: list[object] = []
        self.left: list[object] = []
        methods: dict[str, Callable[..., Awaitable[object]]] = {
            "stream": self.stream,
            "stand": self.stand,
            "give": whole(self.give),
        }
        notices = {"note": lambda _connection, value: self.noticed.append(10 // value)}
        self.listener = CallListener(methods, notices=notices, group="g", left=self.left.append)

    async def stream(
        self,
        call: ServedCall,
        count: int = 9,
        name: str = "t",
        pause_s: float = 0.0,
        fails: str = "",
        times: int = 1,
    ) -> None:
        call.begin({"name": name * times})
        try:
            for text in tokens(count, name):
                call.events(text)
                self.sent[name] = self.sent.get(name, 0) + 1
                await (call.room() if call.must_wait else asyncio.sleep(pause_s))
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if fails:
            raise EngineFailed(fails)
        call.end(usage=USAGE, text="[DONE]")

    async def stand(self, _call: object, name: str = "stand") -> None:
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    async def give(self, value: Any = None, error: str | None = None, times: int = 1) -> object:  # noqa: ANN401
        if value == "refusal":
            return Refusal(status=400, message="No.", retry_after_s=1.5)
        if error is not None:
            raise KeyError(error) if error else KeyError
        return value if times == 1 else value * times


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Process, Channel]]:
    async with ticking():
        process = Process()
        await process.listener.listen(HERE, None)
        channel = Channel(process.listener.place, None)
        try:
            yield process, channel
        finally:
            channel.give_up("the test is over")
            process.listener.close()


async def read(channel: Channel, reader: Reader | None = None, **arguments: Any) -> Any:  # noqa: ANN401
    """Call `stream`; return the call, and what reads it."""
    call = channel.call("stream", arguments)
    await call.result
    reader = reader or Reader()
    call.forward(reader)
    return call, reader


@in_virtual_time
async def test_many_calls_come_whole_on_one_connection() -> None:
    """What came first, then the events in order, then the end; results and errors between them."""
    async with connected() as (process, channel):
        names = [f"a{number}-" for number in range(20)]
        begun = [await read(channel, count=40, name=name, pause_s=0.01) for name in names]
        values = [channel.call("give", {"value": each}).result for each in ({"x": [1]}, "refusal")]
        assert await values[0] == {"x": [1]}
        assert await values[1] == Refusal(status=400, message="No.", retry_after_s=1.5)
        await asyncio.gather(*(reader.over.wait() for _, reader in begun))
        for name, (call, reader) in zip(names, begun, strict=True):
            assert (call.streams, call.result.result()) == (True, {"name": name})
            assert reader.text == b"".join(tokens(40, name))
            assert reader.ending == {"usage": USAGE, "text": "[DONE]", "error": ""}
        await process.listener.drain()
        assert len(process.listener.connections) == 1


@in_virtual_time
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"error": "it is lost"}, "'it is lost'"),
        ({"error": ""}, "KeyError"),
        ({"error": "x" * 5000}, "'" + "x" * (MOST_ERROR - 1)),
        ({"nothing": "like it"}, ".*unexpected keyword argument 'nothing'"),
    ],
)
async def test_a_call_that_fails_fails_alone(arguments: dict[str, Any], said: str) -> None:
    """Its caller gets the reason in so many words, before events or after them."""
    async with connected() as (_, channel):
        _, broken = await read(channel, fails="it is dead")
        _, other = await read(channel, pause_s=0.1)
        with pytest.raises(EngineFailed, match=f"^{said}$"):
            await channel.call("give", arguments).result
        await asyncio.gather(broken.over.wait(), other.over.wait())
        assert (broken.count, broken.ending) == (9, {"error": "it is dead"})
        assert (other.count, other.ending and other.ending["error"]) == (9, "")


@in_virtual_time
async def test_long_payloads_arrive_and_longer_ones_are_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a call, of a result and of what comes before events, up to the longest frame."""
    most = 3_000_000
    async with connected() as (_, channel):
        _, reader = await read(channel, pause_s=1.0)
        monkeypatch.setattr(channels, "MOST_BYTES", most)
        around = len(json.dumps({"method": "give", "arguments": {"value": ""}}))
        for more, named in ((0, None), (1, "a call has 3000001 bytes; expected at most 3000000")):
            call = channel.call("give", {"value": "x" * (most - around + more)})
            if named is None:
                assert len(await call.result) == most - around
            else:
                with pytest.raises(EngineFailed, match=named):
                    await call.result
        monkeypatch.setattr(channels, "MOST_BYTES", 2000)
        assert len(await channel.call("give", {"value": "x" * 999, "times": 2}).result) == 1998
        for method, argument in (("give", "value"), ("stream", "name")):
            with pytest.raises(EngineFailed, match="expected at most 2000"):
                await channel.call(method, {argument: "x" * 1000, "times": 2}).result
        await reader.over.wait()
        assert (reader.count, reader.error) == (9, None)


@in_virtual_time
async def test_very_long_events_arrive() -> None:
    """What an engine gives at once may be longer than a frame; other calls go on between."""
    async with connected() as (_, channel):
        _, long = await read(channel, count=2, name="x" * 9_000_000)
        _, other = await read(channel, pause_s=0.1)
        await asyncio.gather(long.over.wait(), other.over.wait())
        assert long.text == b"".join(tokens(2, "x" * 9_000_000))
        assert other.count == 9


@in_virtual_time
async def test_events_wait_for_their_reader_and_are_joined_where_the_caller_falls_behind() -> None:
    """What one read brings for a call is one piece for its reader."""
    async with connected() as (_, channel):
        call, reader = channel.call("stream", {"count": 100, "pause_s": 0.01}), Reader()
        await call.result
        await asyncio.sleep(0.5)
        channel.transport.pause_reading()
        await asyncio.sleep(5.0)
        channel.transport.resume_reading()
        await asyncio.sleep(1.0)
        call.forward(reader)
        assert (reader.text, reader.over.is_set()) == (b"".join(tokens(100)), True)
        assert reader.pieces < 70


@in_virtual_time
async def test_the_process_waits_where_the_caller_does_not_read() -> None:
    """It keeps no more than what the sockets and a small buffer hold."""
    async with connected() as (process, channel):
        _, reader = await read(channel, count=300, name="x" * 100_000)
        channel.transport.pause_reading()
        await asyncio.sleep(10.0)
        sent = process.sent["x" * 100_000]
        assert sent < 200
        await asyncio.sleep(10.0)
        assert process.sent["x" * 100_000] == sent
        channel.transport.resume_reading()
        await reader.over.wait()
        assert reader.count == 300


@in_virtual_time
async def test_a_reader_that_stands_still_holds_up_its_own_call_alone() -> None:
    async with connected() as (process, channel):
        slow_call, slow = await read(channel, count=50, name="slow", pause_s=0.1)
        _, quick = await read(channel, count=50, pause_s=0.1)
        await asyncio.sleep(1.0)
        slow_call.tell(Kind.HOLD)
        await quick.over.wait()
        held = slow.count
        assert held < 20
        await asyncio.sleep(100.0)
        assert (slow.count, process.sent["slow"]) == (held, held)
        slow_call.tell(Kind.GO_ON)
        await slow.over.wait()
        assert (slow.count, quick.count) == (50, 50)


@in_virtual_time
async def test_a_call_that_is_cancelled_ends_the_work_and_no_other() -> None:
    """Nothing comes of it any more, before its result and after; an ended one stays as it is."""
    async with connected() as (process, channel):
        call, reader = await read(channel, count=1000, name="left", pause_s=0.1)
        ended_call, ended = await read(channel, count=2)
        _, other = await read(channel, pause_s=0.5)
        stands = channel.call("stand", {})
        await asyncio.sleep(1.0)
        for each in (call, stands, ended_call):
            each.cancel()
        before = reader.text
        await other.over.wait()
        assert (process.cancelled, reader.text) == (["left", "stand"], before)
        assert (stands.result.cancelled(), ended.count, other.count) == (True, 2, 9)
        assert not process.listener.calls


@in_virtual_time
@pytest.mark.parametrize("side", ["caller", "listener"])
async def test_a_connection_that_is_lost_ends_its_calls_on_both_sides(side: str) -> None:
    """Those that run are cancelled, and their callers told, as are those that come later."""
    async with connected() as (process, channel):
        _, reader = await read(channel, count=1000, name="cut", pause_s=0.1)
        stands = channel.call("stand", {})
        await asyncio.sleep(1.0)
        [connection] = process.listener.connections
        (channel if side == "caller" else connection).transport.abort()
        await reader.over.wait()
        assert "was lost" in str(reader.error)
        for call in (stands, channel.call("give", {})):
            with pytest.raises(ChannelLostError):
                await call.result
        await process.listener.drain()
        assert (sorted(process.cancelled), channel.closed) == (["cut", "stand"], True)
        assert process.left == [connection]


@in_virtual_time
async def test_a_reader_that_fails_is_dropped_alone() -> None:
    """Also one that fails when it is told that the connection is lost."""

    class Failing(Reader):
        def events(self, text: bytes) -> None:
            super().events(text)
            if self.count > 2:
                raise ZeroDivisionError

        def lost(self, error: ChannelLostError) -> None:
            raise ZeroDivisionError from error

    async with connected() as (process, channel):
        await read(channel, Failing(), count=1000, name="broken", pause_s=0.1)
        _, other = await read(channel, pause_s=0.1)
        await other.over.wait()
        assert (other.count, process.cancelled) == (9, ["broken"])
        broken = channel.call("stand", {})
        await read(channel, Failing(), count=2, name="late", pause_s=100.0)
        _, other = await read(channel, pause_s=100.0)
        channel.transport.abort()
        await other.over.wait()
        assert isinstance(other.error, ChannelLostError)
        assert isinstance(broken.result.exception(), ChannelLostError)


@in_virtual_time
async def test_notices_are_taken_in_order_and_one_that_fails_harms_nothing() -> None:
    async with connected() as (process, channel):
        _, reader = await read(channel, pause_s=0.1)
        for value in (1, 2, 0, 5):
            channel.notify("note", {"value": value})
        await reader.over.wait()
        assert (process.noticed, reader.count) == ([10, 5, 2], 9)


@in_virtual_time
async def test_a_process_drains_until_its_last_call_has_ended() -> None:
    """Also calls that come meanwhile; without any at once."""
    async with connected() as (process, channel):
        await process.listener.drain()
        await channel.call("give", {}).result
        _, first = await read(channel, count=5, pause_s=1.0)
        draining = asyncio.create_task(process.listener.drain())
        await asyncio.sleep(3.0)
        _, second = await read(channel, count=5, pause_s=1.0)
        await first.over.wait()
        await asyncio.sleep(0.5)
        assert not draining.done()
        await second.over.wait()
        await draining


MINE = bytes(NONCE_BYTES)
SECRET = bytes(range(32))


async def _greeted_by(listener: CallListener) -> Any:  # noqa: ANN401
    """Return both ends of a connection, and the nonce that the listener greeted with."""
    receiving, sending = await asyncio.open_connection(HERE, listener.place.port)
    size = HEADER.size + len(hello(MINE))
    [(_, _, greeting)] = FrameReader(99).feed(await receiving.readexactly(size))
    return receiving, sending, nonce_in(greeting)


async def _rest(receiving: asyncio.StreamReader, within_s: float = 60.0) -> bytes:
    try:
        return await asyncio.wait_for(receiving.read(), within_s)
    except ConnectionResetError:
        return b""


@in_virtual_time
@pytest.mark.parametrize(
    ("what", "named"),
    [
        (frame(Kind.HELLO, 0, hello(MINE) + bytes(32)), "proof is wrong"),
        (frame(Kind.HELLO, 0, hello(MINE)), "proof is wrong"),
        (frame(Kind.CALL, 1, b"{}"), "before the greeting"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "expected kinds"),
        (HEADER.pack(MOST_STRANGER_BYTES + 1, 0, Kind.HELLO), "at most"),
        (b"\x00", "no proof came in time"),
        (
            frame(Kind.HELLO, 0, hello(MINE).replace(b"\x00\x02", b"\x00\x09", 1) + bytes(32)),
            "version 9; expected 2",
        ),
    ],
    ids=["wrong", "none", "early", "http", "long", "silent", "version"],
)
async def test_strangers_are_shut_out_and_named(
    caplog: pytest.LogCaptureFixture, what: bytes, named: str
) -> None:
    """Their connections are closed, without a word to them; calls under way go on."""
    async with connected() as (process, channel):
        _, reader = await read(channel, count=20, pause_s=1.0)
        receiving, sending, _ = await _greeted_by(process.listener)
        with caplog.at_level(logging.WARNING):
            sending.write(what)
            assert await _rest(receiving) == b""
        sending.close()
        assert named in caplog.text
        assert process.left == []
        await reader.over.wait()
        assert reader.count == 20


@in_virtual_time
async def test_the_oldest_of_many_strangers_make_room() -> None:
    """However many come at once, callers get through, and those that have are not counted."""
    async with connected() as (process, channel):
        _, reader = await read(channel, pause_s=1.0)
        opening = (asyncio.open_connection(HERE, process.listener.place.port) for _ in range(90))
        opened = await asyncio.gather(*opening)
        await asyncio.sleep(1.0)
        assert len(process.listener.strangers) == MOST_STRANGERS
        assert len(process.listener.connections) == MOST_STRANGERS + 1
        late = Channel(process.listener.place, None)
        await late.ready()
        await reader.over.wait()
        late.give_up("the test is over")
        for _, sending in opened:
            sending.close()


@in_virtual_time
@pytest.mark.parametrize(
    ("then", "named"),
    [
        (frame(Kind.RESULT, 1, b"{}"), "expected one that a caller sends"),
        (frame(Kind.HELLO, 0, hello(MINE)), "expected one that a caller sends"),
        (frame(Kind.CALL, 1, b'{"method": "none", "arguments": {}}'), "nothing that is here"),
        (frame(Kind.CALL, 1, b"{"), "nothing that is here"),
        (frame(Kind.CALL, 1, b"[]"), "nothing that is here"),
        (frame(Kind.NOTICE, 0, b'{"method": "stand", "arguments": {}}'), "nothing that is here"),
        (2 * frame(Kind.CALL, 1, b'{"method": "stand", "arguments": {}}'), "came twice"),
        (HEADER.pack((64 << 20) + 1, 1, Kind.CALL), "at most"),
        (b"", "no sign of life"),
    ],
)
async def test_a_caller_that_breaks_off_or_says_what_no_caller_says_is_cut_off(
    caplog: pytest.LogCaptureFixture, then: bytes, named: str
) -> None:
    """Alone, and with the calls that it had."""
    async with connected() as (process, channel):
        _, reader = await read(channel, pause_s=10.0)
        receiving, sending, theirs = await _greeted_by(process.listener)
        secret = bytes.fromhex(process.listener.place.secret)
        mine = proof(secret, b"caller", theirs, MINE)
        sending.write(frame(Kind.HELLO, 0, hello(MINE) + mine))
        proved = proof(secret, b"listener", theirs, MINE)
        expected = frame(Kind.PROOF, 0, proved)
        assert await receiving.readexactly(len(expected)) == expected
        sending.write(frame(Kind.PING))
        assert await receiving.readexactly(HEADER.size) == frame(Kind.PONG)
        with caplog.at_level(logging.WARNING):
            sending.write(then)
            assert await _rest(receiving, 2 * SILENT_S) == b""
        sending.close()
        assert named in caplog.text
        assert len(process.left) == 1
        await reader.over.wait()
        assert reader.count == 9


@asynccontextmanager
async def _imposter(
    act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[ChannelPlace]:
    opened: list[asyncio.StreamWriter] = []

    async def acting(receiving: asyncio.StreamReader, sending: asyncio.StreamWriter) -> None:
        opened.append(sending)
        await act(receiving, sending)

    async with ticking():
        server = await asyncio.start_server(acting, HERE, 0)
        try:
            port = server.sockets[0].getsockname()[1]
            yield ChannelPlace(host=HERE, port=port, secret=SECRET.hex())
        finally:
            server.close()
            for sending in opened:
                sending.close()


CALL_1_BEGAN = frame(Kind.BEGUN, 1, b"{}")


@in_virtual_time
@pytest.mark.parametrize(
    ("secret", "then", "named", "within_s"),
    [
        (bytes(32), frame(Kind.EVENTS, 1, b"forged"), "another process listens there", 1.0),
        (SECRET, b"", "no sign of life", 2 * SILENT_S),  # open on one side only
        (SECRET, CALL_1_BEGAN, "no sign of life", 2 * SILENT_S),
        (SECRET, frame(Kind.CALL, 1), "expected one that a listener sends", 1.0),
        (SECRET, frame(Kind.PROOF), "expected one that a listener sends", 1.0),
        (SECRET, CALL_1_BEGAN + frame(Kind.END, 1, b"{"), "cannot be read", 1.0),
        (SECRET, frame(Kind.RESULT, 1, b'{"is": "nothing"}'), "cannot be read", 1.0),
        (SECRET, frame(Kind.RESULT, 1, b'{"is": "Refusal"}'), "cannot be read", 1.0),
        (SECRET, HEADER.pack((64 << 20) + 1, 1, Kind.EVENTS), "at most", 1.0),
        (SECRET, frame(Kind.EVENTS, 1, b"half of a frame")[:-3], "it ended", 1.0),
        (None, b"", "no greeting came in time", 2 * CONNECT_S),
        (None, frame(Kind.HELLO, 0, b"SSH-2.0"), "no greeting of a channel", 1.0),
    ],
)
async def test_a_process_that_is_none_or_is_gone_ends_the_calls(
    secret: bytes | None, then: bytes, named: str, within_s: float
) -> None:
    """With a reason, and without a byte that was not proved to be the process's."""

    async def act(receiving: asyncio.StreamReader, sending: asyncio.StreamWriter) -> None:
        if secret is not None:
            sending.write(frame(Kind.HELLO, 0, hello(MINE)))
            size = HEADER.size + len(hello(MINE)) + 32
            [(_, _, greeting)] = FrameReader(999).feed(await receiving.readexactly(size))
            mine = proof(secret, b"listener", MINE, nonce_in(greeting))
            sending.write(frame(Kind.PROOF, 0, mine))
        sending.write(then)
        await sending.drain()
        if named == "it ended":
            sending.close()

    async with _imposter(act) as place:
        ended: list[bool] = []
        channel, reader = Channel(place, None, lambda: ended.append(True)), Reader()
        call: Call = channel.call("stream", {})
        call.forward(reader)
        error: object = None
        async with asyncio.timeout(within_s):
            try:
                await call.result
                await reader.over.wait()
                error = reader.error
            except ChannelLostError as lost:
                error = lost
        assert named in str(error)
        assert (reader.text, channel.closed, ended) == (b"", True, [True])


@in_virtual_time
async def test_a_process_that_cannot_be_reached_ends_the_calls() -> None:
    async def act(*_: object) -> None:
        """Say nothing."""

    async with _imposter(act) as place:
        pass
    async with ticking():
        channel = Channel(place, None)
        with pytest.raises(ChannelLostError, match="cannot connect"):
            await channel.call("give", {}).result
        with pytest.raises(ChannelLostError, match="cannot connect"):
            await channel.ready()


@in_virtual_time
async def test_connections_are_kept_up_as_long_as_their_processes_are_expected() -> None:
    """A lost one is made anew, however often; *changed* is told of each step."""
    async with connected() as (process, _):
        place = process.listener.place
        told: list[list[str]] = []
        kept = Channels(None, lambda: told.append([*kept.connected]))
        with pytest.raises(ChannelLostError, match="no connection to p0"):
            kept.call("p0", "give", {})
        kept.expect({"p0": place})
        assert await kept.call("p0", "give", {"value": 1}).result == 1  # it waits for the greeting
        for _ in range(3):
            kept.connected["p0"].transport.abort()
            await asyncio.sleep(2.0)
        assert await kept.call("p0", "give", {"value": 2}).result == 2
        assert told == [["p0"], *([], ["p0"]) * 3]
        kept.close()
        await asyncio.sleep(5.0)
        assert (kept.connected, told[-1]) == ({}, [])
        assert len(process.listener.connections) == 1


@in_virtual_time
async def test_a_process_that_is_expected_no_more_ends_what_it_has() -> None:
    """It is called no more; where it is expected again meanwhile, nothing is cut either."""
    async with connected() as (process, _):
        kept = Channels(None)
        kept.expect({"p0": process.listener.place})
        call = kept.call("p0", "stream", {"count": 20, "pause_s": 1.0})
        await call.result
        call.forward(reader := Reader())
        kept.expect({})
        assert kept.connected == {}
        await asyncio.sleep(2.0)
        kept.expect({"p0": process.listener.place})
        await asyncio.sleep(2.0)
        assert [*kept.connected] == ["p0"]
        kept.expect({})
        await reader.over.wait()
        assert (reader.count, reader.error, kept.connected) == (20, None, {})
        process.listener.close()
        await asyncio.sleep(5.0)
        with pytest.raises(ChannelLostError):
            kept.call("p0", "give", {})
        kept.close()


@in_virtual_time
async def test_a_process_at_another_place_is_called_there() -> None:
    """Once, and for good; what was under way at the former place ends."""
    async with connected() as (former, _), connected() as (later, _):
        told: list[list[str]] = []
        kept = Channels(None, lambda: told.append([*kept.connected]))
        kept.expect({"p0": former.listener.place})
        stands = kept.call("p0", "stand", {})
        await asyncio.sleep(1.0)
        kept.expect({"p0": later.listener.place})
        with pytest.raises(ChannelLostError, match="another place"):
            await stands.result
        call = kept.call("p0", "stream", {"count": 20, "pause_s": 1.0})
        await call.result
        call.forward(reader := Reader())
        await reader.over.wait()
        assert (reader.count, later.sent, told) == (20, {"t": 20}, [["p0"], [], ["p0"]])
        kept.close()


async def _read_over(
    listens: ssl.SSLContext | None, calls: ssl.SSLContext | None
) -> dict[str, Any] | Exception:
    process = Process()
    await process.listener.listen(HERE, listens)
    assert process.listener.place.group == "g"
    channel = Channel(process.listener.place, calls)
    try:
        async with asyncio.timeout(30.0):
            _, reader = await read(channel)
            await reader.over.wait()
        assert reader.count == 9
    except ChannelLostError as error:
        return error
    finally:
        channel.give_up("the test is over")
        process.listener.close()
        await asyncio.sleep(0.1)
    return reader.ending or {}


@pytest.mark.parametrize("trusted", [True, False])
def test_tls_by_the_clusters_certificates(tmp_path: Path, *, trusted: bool) -> None:
    """Where Ray uses TLS so does a channel, and a side with another certificate is shut out."""
    mine = write_certificate(tmp_path / "mine.pem", HERE)
    theirs = mine if trusted else write_certificate(tmp_path / "theirs.pem", HERE)

    def context(own: Path, *, listens: bool) -> ssl.SSLContext | None:
        environ = {USE_TLS: "1", **dict.fromkeys(CERTIFICATES, str(own))}
        return channel_tls(environ, listens=listens)

    found = uvloop.run(_read_over(context(mine, listens=True), context(theirs, listens=False)))
    assert isinstance(found, dict) == trusted


def test_without_tls_in_the_loop_of_ray() -> None:
    assert channel_tls({}, listens=True) is None
    assert isinstance(uvloop.run(_read_over(None, None)), dict)


@in_virtual_time
async def test_a_caller_with_the_wrong_secret_gets_nothing() -> None:
    async with connected() as (process, _):
        wrong = Channel(replace(process.listener.place, secret="00" * 32), None)
        with pytest.raises(ChannelLostError):
            await wrong.call("stream", {}).result
        assert process.sent == {}
