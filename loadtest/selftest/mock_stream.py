"""Streams of the bundled server: every token at its time, all that are due at one wake-up."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.selftest.mock_config import MockConfig
from minicluster.http_client.sse import DONE

GRAIN_S = 0.0005
"""Tokens due within it are sent together, as an engine's step does: a wake-up costs more."""

FLOOD_BYTES = 1 << 20
TRILLION = 10**12
GARBAGE = {"text": b"{garbage", "deep": b"[" * 100_000}


@dataclass(slots=True, kw_only=True)
class FakeStream:
    """
    One answer on its way.

    Attributes:
        gone: whether its client has left.
        start_s: its prefill begins, on the monotonic clock.
        sent_s: when each chunk was written.
        ended: resolved once it is over; false: its connection was cut.
    """

    does: MockConfig
    writer: asyncio.StreamWriter
    gone: Callable[[], bool]
    chat: bool
    num_prompt: int
    num_output: int
    ids: bool
    start_s: float
    stalls_s: tuple[float, float]
    sent_s: list[float] = field(default_factory=list)
    ended: asyncio.Future[bool] = field(default_factory=asyncio.Future)
    done: int = 0

    def open(self) -> None:
        """Send the head, and the empty chunk that some servers send early."""
        timing = self.does.timing or f"prefill;dur={1e3 * self.does.ttft_s:.3f}, handoff;dur=1.5"
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nserver-timing: %s\r\n"
            b"transfer-encoding: chunked\r\n\r\n" % timing.encode()
        )
        if self.does.early_chunk:
            self._send(self._chunk(0))

    @property
    def new(self) -> int:
        """Tokens in the next chunk."""
        new = self.does.tokens_per_chunk
        if self.does.endless or self.does.mute_after_tokens:
            return new
        return min(new, self.num_output - self.done)

    @property
    def due_s(self) -> float:
        """When the next chunk is to be sent."""
        last = self.done + self.new - 1
        due_s = self.start_s + self.does.ttft_s + last * self.does.itl_s
        from_s, to_s = self.stalls_s
        return to_s if from_s <= due_s < to_s else due_s

    def step(self) -> bool:
        """Send the next chunk; return whether there is another one."""
        does, new = self.does, self.new
        if self.writer.is_closing() or self.gone():
            return self._end(whole=False)
        if does.cut_after_tokens and self.done + new > does.cut_after_tokens:
            self.writer.transport.abort()
            return self._end(whole=False)
        self.done += new
        if does.mute_after_tokens and self.done > does.mute_after_tokens:
            return True  # says nothing more, and does not hang up
        self.sent_s.append(time.monotonic())
        self._say(new)
        if self.done < self.num_output or does.endless:
            return True
        if does.usage:
            self._send(b'{"id": "x", "choices": [], "usage": %s}' % self._usage())
        self._send(DONE)
        if not does.unclosed:
            self.writer.write(b"0\r\n\r\n")
        return self._end(whole=True)

    def _end(self, *, whole: bool) -> bool:
        if not self.ended.done():
            self.ended.set_result(whole)
        return False

    def _say(self, new: int) -> None:
        """Send a chunk of *new* tokens, or what there is instead, and besides."""
        if self.does.garbage == "line":
            self._flood(b"x")
        else:
            self._send(GARBAGE.get(self.does.garbage) or self._chunk(new))
        if self.does.flood:
            self._flood(b": never a pause\n")

    def _chunk(self, new: int) -> bytes:
        """Return a chunk of *new* tokens; formatted by hand, for it is most of a token's cost."""
        text = b" a" * new
        if self.chat:
            role = b'"role": "assistant", ' if not self.done or self.done == new else b""
            choice = b'{"index": 0, "delta": {%s"content": "%s"}}' % (role, text)
        else:
            choice = b'{"index": 0, "text": "%s"' % text
            if self.ids:
                choice += b', "token_ids": %s' % json.dumps([self.done] * new).encode()
            choice += b"}"
        usage = b""
        if self.does.usage and self.does.running_usage:
            usage = b', "usage": %s' % self._usage()
        kind = b"chat.completion.chunk" if self.chat else b"text_completion"
        return b'{"id": "x", "object": "%s", "choices": [%s]%s}' % (kind, choice, usage)

    def _usage(self) -> bytes:
        leaps = self.does.garbage == "leap" and self.done > self.does.tokens_per_chunk
        done = TRILLION if leaps else self.done
        return b'{"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}' % (
            self.num_prompt,
            done,
            self.num_prompt + done,
        )

    def _send(self, data: bytes) -> None:
        """Write one event as one HTTP chunk."""
        self.writer.write(b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data))

    def _flood(self, data: bytes) -> None:
        """Write *data* again and again, unless there is more to send than anyone reads."""
        if self.writer.transport.get_write_buffer_size() < FLOOD_BYTES:
            times = FLOOD_BYTES // len(data)
            self.writer.write(b"%x\r\n%s\r\n" % (times * len(data), data * times))


class Ticker:
    """Steps streams at their times."""

    def __init__(self) -> None:
        """Nothing is due yet."""
        self._due: list[tuple[float, int, FakeStream]] = []
        self._numbers = itertools.count()
        self._more = asyncio.Event()

    def add(self, stream: FakeStream) -> None:
        """Step *stream* from now on until it ends."""
        heapq.heappush(self._due, (stream.due_s, next(self._numbers), stream))
        self._more.set()

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            now_s = time.monotonic() + GRAIN_S
            while self._due and self._due[0][0] <= now_s:
                _, number, stream = self._due[0]
                if stream.step():
                    heapq.heapreplace(self._due, (stream.due_s, number, stream))
                else:
                    heapq.heappop(self._due)
            self._more.clear()
            wait_s = self._due[0][0] - time.monotonic() if self._due else None
            try:
                await asyncio.wait_for(self._more.wait(), wait_s)
            except TimeoutError:
                continue


def prompt_tokens(request: dict[str, Any]) -> int:
    """Count the prompt's tokens: its ids, or its words."""
    prompt = request.get("prompt")
    if prompt is None:
        return sum(len(str(m.get("content", "")).split()) for m in request["messages"])
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)
