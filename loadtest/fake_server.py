"""An OpenAI-compatible server with known timings, for `loadtest selftest` and the tests."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, fields
from typing import Any, TextIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """
    What the server does, well or badly.

    Attributes:
        ttft_s: request received to first token sent.
        itl_s: between tokens.
        tokens_per_chunk: tokens merged into one chunk.
        early_chunk: 1: send an empty chunk at once, as some servers do.
        running_usage: 1: each chunk carries the running total, as vLLM does on request.
        usage: 0: no usage at all.
        stall_at_s: seconds after the first request, from when nothing is sent ...
        stall_s: ... for so long.
        cut_after_tokens: cut the connection after so many; 0: never.
        fail_every: answer every n-th request with `status`; 0: none.
        status: what a failing request is answered.
        garbage: 1: stream what is no JSON.
        die_after_s: exit so long after the first request; 0: never.
        model: served name.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.02
    tokens_per_chunk: int = 1
    early_chunk: int = 0
    running_usage: int = 1
    usage: int = 1
    stall_at_s: float = 0.0
    stall_s: float = 0.0
    cut_after_tokens: int = 0
    fail_every: int = 0
    status: int = 500
    garbage: int = 0
    die_after_s: float = 0.0
    model: str = "fake"


class FakeServer:
    """Requests in, timed chunks out; `log` receives what was truly sent when."""

    def __init__(self, behaviour: Behaviour, log: TextIO | None = None) -> None:
        """Serve with *behaviour*; nothing has come yet."""
        self.behaviour = behaviour
        self.log = log
        self.num_requests = 0
        self.first_request_s = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its client leaves."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                request_line, *lines = head.split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = request_line.split()
                if (method, path) == ("POST", "/v1/completions"):
                    await self._complete(body, headers.get("x-request-id", ""), writer)
                elif path == "/v1/models":
                    _answer(writer, 200, {"data": [{"id": self.behaviour.model}]})
                else:
                    _answer(writer, 404, {"error": {"message": f"no such path: {path}"}})
                await writer.drain()
        writer.close()

    async def _complete(self, body: bytes, name: str, writer: asyncio.StreamWriter) -> None:
        received_s = time.monotonic()
        self.num_requests += 1
        self.first_request_s = self.first_request_s or received_s
        does = self.behaviour
        request = json.loads(body)
        if does.fail_every and self.num_requests % does.fail_every == 0:
            _answer(writer, does.status, {"error": {"message": "told to fail"}})
            return
        prompt = request["prompt"]
        if not all(isinstance(token, int) for token in prompt):
            _answer(writer, 400, {"error": {"message": "this server takes token ids"}})
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        sent_s = await self._stream(writer, received_s, len(prompt), request["max_tokens"])
        if self.log:
            row = {"id": name, "received_s": received_s, "chunk_s": sent_s}
            self.log.write(json.dumps(row) + "\n")
            self.log.flush()

    async def _stream(
        self, writer: asyncio.StreamWriter, received_s: float, num_prompt: int, num_output: int
    ) -> list[float]:
        """Send the tokens, each at its time; return when each chunk was written."""
        does = self.behaviour
        sent_s: list[float] = []
        if does.early_chunk:
            _send(writer, _chunk("", usage=_usage(num_prompt, 0) if does.running_usage else None))
        for start in range(0, num_output, does.tokens_per_chunk):
            stop = min(start + does.tokens_per_chunk, num_output)
            await self._wait_until(received_s + does.ttft_s + (stop - 1) * does.itl_s)
            if does.cut_after_tokens and stop > does.cut_after_tokens:
                writer.transport.abort()
                return sent_s
            usage = _usage(num_prompt, stop) if does.usage and does.running_usage else None
            sent_s.append(time.monotonic())
            _send(writer, b"{garbage" if does.garbage else _chunk(" a" * (stop - start), usage))
            await writer.drain()
        if does.usage:
            _send(writer, json.dumps({"choices": [], "usage": _usage(num_prompt, num_output)}))
        _send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return sent_s

    async def _wait_until(self, due_s: float) -> None:
        stall_from_s = self.first_request_s + self.behaviour.stall_at_s
        stall_to_s = stall_from_s + self.behaviour.stall_s
        if stall_from_s <= due_s < stall_to_s:
            due_s = stall_to_s
        await asyncio.sleep(due_s - time.monotonic())

    async def watch(self) -> None:
        """Die when told to, or when whoever started us has gone."""
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(0.1)
            lived_s = time.monotonic() - self.first_request_s
            if (
                self.behaviour.die_after_s
                and self.first_request_s
                and (lived_s > self.behaviour.die_after_s)
            ):
                break
        os._exit(1)


def _usage(num_prompt: int, num_output: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def _chunk(text: str, usage: dict[str, int] | None) -> str:
    chunk: dict[str, Any] = {"object": "text_completion", "choices": [{"index": 0, "text": text}]}
    return json.dumps(chunk if usage is None else chunk | {"usage": usage})


def _send(writer: asyncio.StreamWriter, data: str | bytes) -> None:
    """Write one event as one HTTP chunk."""
    event = b"data: %s\n\n" % (data if isinstance(data, bytes) else data.encode())
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (status, len(data), data)
    )


async def _main(behaviour: Behaviour, port: int, log: str) -> None:
    with open(log or os.devnull, "w", encoding="utf-8") as file:  # noqa: ASYNC230, PTH123
        fake = FakeServer(behaviour, file)
        server = await asyncio.start_server(fake.serve, "127.0.0.1", port, backlog=1024)
        host, bound = server.sockets[0].getsockname()
        sys.stdout.write(f"http://{host}:{bound}\n")
        sys.stdout.flush()
        await fake.watch()


def main() -> None:
    """Serve until killed, or until the parent process is gone; print the address first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", default="")
    for field in fields(Behaviour):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    port, log = given.pop("port"), given.pop("log")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(Behaviour(**given), port, log))


if __name__ == "__main__":
    main()
