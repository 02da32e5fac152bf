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
from dataclasses import fields
from functools import partial
from typing import Any, TextIO

from loadtest.client.kernel_timestamps import Arrival, enable_timestamps, receive
from loadtest.selftest.mock_stream import MockConfig, MockStream

CHAT = "/v1/chat/completions"
STREAMS = ("/v1/completions", CHAT)


class MockStampedSocket(socket.socket):
    """
    The server's end of a connection.

    Attributes:
        arrival: arrival of the last read.
    """

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
        """Answer the request *name* by *stream*, or fail it as configured."""
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
    for field in fields(MockConfig):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each stream is an open file
    port, log, certificate = (options.pop(name) for name in ("port", "log", "certificate"))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(MockConfig(**options), port, log, certificate))


if __name__ == "__main__":
    main()
