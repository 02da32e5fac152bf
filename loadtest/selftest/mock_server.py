"""An OpenAI-compatible server with known timings, for `loadtest selftest` and the tests."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TextIO

from loadtest.client.kernel_timestamps import Arrival, enable_timestamps, receive
from minicluster.http_client.sse import DONE

FLOOD_BYTES = 1 << 20  # size of the output buffer that `MockConfig.flood` keeps full

DEFAULT_OUTPUT_TOKENS = 16
TRILLION = 10**12
GARBAGE = {"text": b"{garbage", "deep": b"[" * 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """
    Configuration of the mock server: its timings, and the faults that it has.

    Attributes:
        early_chunk: 1: an empty chunk is sent at once, as some servers do.
        usage: 0: no usage is sent at all; 1: each chunk has the running total, as vLLM sends it.
        stall_at_s: seconds from the first request to a pause of all streams.
        cut_after_tokens: tokens after which the connection is cut; 0: never.
        mute_after_tokens: tokens after which nothing is sent, while the connection stays; 0: never.
        endless: 1: tokens never end.
        fail_every: every n-th request is answered with `status`; 0: none.
        status: HTTP status of a failing request.
        garbage: content instead of chunks: `text` is no JSON, `deep` is nested too deeply,
            `leap` is a chunk with a trillion tokens, `line` never ends.
        flood: 1: lines after each chunk, faster than any client reads them.
        unclosed: 1: the answer is marked as ended, and the response stays open.
        timing: `Server-Timing` header; empty: the true one.
        die_after_s: seconds from the second request to the server's exit, as the first comes before
            the load; 0: never.
        template_tokens: tokens of a chat beyond its words.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.02
    tokens_per_chunk: int = 1
    early_chunk: int = 0
    usage: int = 1
    stall_at_s: float = 0.0
    stall_s: float = 0.0
    cut_after_tokens: int = 0
    mute_after_tokens: int = 0
    endless: int = 0
    fail_every: int = 0
    status: int = 500
    garbage: str = ""
    flood: int = 0
    unclosed: int = 0
    timing: str = ""
    key: str = ""
    die_after_s: float = 0.0
    template_tokens: int = 0
    model: str = "fake"


@dataclass(slots=True, kw_only=True)
class MockStream:
    """
    One answer while it is sent.

    Attributes:
        gone: whether the client has disconnected.
        received_s: arrival of the request's last byte, on the monotonic clock; its prefill starts.
        stalls_s: start and end of the pause.
        sent_s: time at which each chunk was written.
        done: number of tokens sent.
    """

    config: MockConfig
    request: dict[str, Any]
    chat: bool
    writer: asyncio.StreamWriter
    gone: Callable[[], bool]
    received_s: float
    stalls_s: tuple[float, float] = (0.0, 0.0)
    sent_s: list[float] = field(default_factory=list)
    done: int = 0
    input_tokens: int = field(init=False)
    output_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Read the lengths of the prompt, a chat's template included, and of the answer."""
        template_tokens = self.config.template_tokens if self.chat else 0
        self.input_tokens = count_input_tokens(self.request) + template_tokens
        limit = self.request.get("max_tokens") or self.request.get("max_completion_tokens")
        self.output_tokens = limit or DEFAULT_OUTPUT_TOKENS

    def open(self) -> None:
        """Send the response head, and the early empty chunk if configured."""
        prefill_ms = 1e3 * self.config.ttft_s
        true = f"prefill_queue;dur=0.0, prefill;dur={prefill_ms:.3f}, handoff;dur=1.5"
        timing = self.config.timing or true
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nserver-timing: %s\r\n"
            b"transfer-encoding: chunked\r\n\r\n" % timing.encode()
        )
        if self.config.early_chunk:
            self._send(self._chunk(0))

    @property
    def new(self) -> int:
        """Tokens in the next chunk."""
        new = self.config.tokens_per_chunk
        if self.config.endless or self.config.mute_after_tokens:
            return new
        return min(new, self.output_tokens - self.done)

    @property
    def due_s(self) -> float:
        """Time at which the next chunk is to be sent."""
        last = self.done + self.new - 1
        due_s = self.received_s + self.config.ttft_s + last * self.config.itl_s
        from_s, to_s = self.stalls_s
        return to_s if from_s <= due_s < to_s else due_s

    def step(self) -> bool:
        """Send the next chunk; return whether there is another one."""
        config, new = self.config, self.new
        if self.writer.is_closing() or self.gone():
            return False
        if config.cut_after_tokens and self.done + new > config.cut_after_tokens:
            self.writer.transport.abort()
            return False
        self.done += new
        if config.mute_after_tokens and self.done > config.mute_after_tokens:
            return True  # sends nothing more, and keeps the connection
        self.sent_s.append(time.monotonic())
        self._send_tokens(new)
        if self.done < self.output_tokens or config.endless:
            return True
        if config.usage:
            self._send(b'{"id": "x", "choices": [], "usage": %s}' % self._usage())
        self._send(DONE)
        if not config.unclosed:
            self.writer.write(b"0\r\n\r\n")
        return False

    def _send_tokens(self, new: int) -> None:
        if self.config.garbage == "line":
            self._flood(b"x")
        else:
            self._send(GARBAGE.get(self.config.garbage) or self._chunk(new))
        if self.config.flood:
            self._flood(b": never a pause\n")

    def _chunk(self, new: int) -> bytes:
        """Return a chunk of *new* tokens; formatted by hand, as it dominates the cost."""
        text = b" a" * new
        if self.chat:
            role = b'"role": "assistant", ' if not self.done or self.done == new else b""
            choice = b'{"index": 0, "delta": {%s"content": "%s"}}' % (role, text)
        else:
            choice = b'{"index": 0, "text": "%s"' % text
            if self.request.get("return_token_ids"):
                choice += b', "token_ids": %s' % json.dumps([self.done] * new).encode()
            choice += b"}"
        usage = b', "usage": %s' % self._usage() if self.config.usage else b""
        kind = b"chat.completion.chunk" if self.chat else b"text_completion"
        return b'{"id": "x", "object": "%s", "choices": [%s]%s}' % (kind, choice, usage)

    def _usage(self) -> bytes:
        leaps = self.config.garbage == "leap" and self.done > self.config.tokens_per_chunk
        done = TRILLION if leaps else self.done
        return b'{"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}' % (
            self.input_tokens,
            done,
            self.input_tokens + done,
        )

    def _send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data))

    def _flood(self, data: bytes) -> None:
        """Write *data* repeatedly, until the output buffer is full."""
        if self.writer.transport.get_write_buffer_size() < FLOOD_BYTES:
            times = FLOOD_BYTES // len(data)
            self.writer.write(b"%x\r\n%s\r\n" % (times * len(data), data * times))


def count_input_tokens(request: dict[str, Any]) -> int:
    """Return the prompt's length: the number of its ids, or of its words."""
    prompt = request.get("prompt")
    if prompt is None:
        return sum(len(str(m.get("content", "")).split()) for m in request["messages"])
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


CHAT = "/v1/chat/completions"
STREAMS = ("/v1/completions", CHAT)


class MockStampedSocket(socket.socket):
    """The server's end of a connection, with the `arrival` of its last read."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.settimeout(0)
        enable_timestamps(self)
        self.arrival = Arrival(time.monotonic(), by_kernel=False)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Read up to *size* bytes."""
        received, self.arrival = receive(self, size, flags)
        return received

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0, /) -> int:  # noqa: ANN401
        """Read into *buffer*, as TLS config."""
        received = super().recv_into(buffer, size, flags)
        self.arrival = Arrival(time.monotonic(), by_kernel=False)
        return received


class MockServer:
    """Answers requests with timed chunks; `log` receives the true time of each chunk."""

    def __init__(self, config: MockConfig, log: TextIO) -> None:
        self.config, self.log = config, log
        self.num_requests = 0
        self.first_request_s = self.loaded_s = 0.0

    async def accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve all connections to *listener*, for ever, with *tls* if given."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # out of file descriptors, for now
                await asyncio.sleep(1)
                continue
            sock = MockStampedSocket(connection.detach())
            reader = asyncio.StreamReader()
            serve = partial(self.serve, sock)
            protocol = partial(asyncio.StreamReaderProtocol, reader, serve)
            with contextlib.suppress(OSError):  # a client that does not trust us disconnects
                await loop.connect_accepted_socket(protocol, sock, ssl=tls)

    async def serve(
        self, sock: MockStampedSocket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection until the client disconnects."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                request_line, *lines = head.split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = request_line.split()
                key = self.config.key
                if key and headers.get("authorization") != f"Bearer {key}":
                    _answer(writer, 401, {"error": {"message": "no valid key"}})
                elif method == "POST" and path in STREAMS:
                    stream = MockStream(
                        config=self.config,
                        request=json.loads(body),
                        chat=path == CHAT,
                        writer=writer,
                        gone=reader.at_eof,
                        received_s=sock.arrival.at_s,
                    )
                    await self._complete(stream, headers.get("x-request-id", ""))
                elif path == "/v1/models":
                    listed = {"id": self.config.model, "object": "model"}
                    _answer(writer, 200, {"object": "list", "data": [listed]})
                else:
                    _answer(writer, 404, {"error": {"message": f"no such path: {path}"}})
                await writer.drain()
        writer.close()

    async def _complete(self, stream: MockStream, name: str) -> None:
        self.num_requests += 1
        self.first_request_s = self.first_request_s or stream.received_s
        if self.num_requests > 1:
            self.loaded_s = self.loaded_s or stream.received_s
        config = self.config
        if config.fail_every and self.num_requests % config.fail_every == 0:
            _answer(stream.writer, config.status, {"error": {"message": "configured to fail"}})
            return
        stall_s = self.first_request_s + config.stall_at_s
        stream.stalls_s = (stall_s, stall_s + config.stall_s)
        stream.open()
        more = True
        while more:
            await asyncio.sleep(stream.due_s - time.monotonic())
            more = stream.step()
        row = {"id": name, "received_s": stream.received_s, "chunk_s": stream.sent_s}
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()

    async def watch(self) -> None:
        """Exit at the configured time, or when the parent process is gone."""
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(0.1)
            lived_s = time.monotonic() - self.loaded_s if self.loaded_s else 0.0
            if 0 < self.config.die_after_s < lived_s:
                break
        os._exit(1)


def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d -\r\nlocation: /elsewhere\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (status, len(data), data)
    )


async def _main(config: MockConfig, port: int, log: str, certificate: str) -> None:
    tls = None
    if certificate:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate)
    with open(log or os.devnull, "w", encoding="utf-8") as file:  # noqa: ASYNC230, PTH123
        server = MockServer(config, file)
        listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        listener.settimeout(0)
        host, bound = listener.getsockname()
        sys.stdout.write(f"{'https' if tls else 'http'}://{host}:{bound}\n")
        sys.stdout.flush()
        await asyncio.gather(server.accept(listener, tls), server.watch())


def main() -> None:
    """Serve until killed, or until the parent process is gone; print the address first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", default="")
    parser.add_argument("--certificate", default="", help="PEM, with its key: serve by TLS")
    for key in fields(MockConfig):
        option = "--" + key.name.replace("_", "-")
        parser.add_argument(option, type=type(key.default), default=key.default)
    options = vars(parser.parse_args())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each stream is an open file
    port, log, certificate = (options.pop(name) for name in ("port", "log", "certificate"))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(MockConfig(**options), port, log, certificate))


if __name__ == "__main__":
    main()
