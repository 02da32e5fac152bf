"""Pools that answer without an engine: the endpoint is tested, and timed, on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from serving.protocol.messages import (
    AnswerEnd,
    AnswerReader,
    FirstChunk,
    PrefillTiming,
    Refusal,
    RequestPhases,
)
from serving.replicas.roles import EventSplitter, with_usage
from serving.request.cost import prompt_size


class FakeAnswer:
    """An answer whose events an iterator has, told as a replica tells them."""

    def __init__(self, begun: Any, items: AsyncGenerator[Any], splitter: EventSplitter) -> None:  # noqa: ANN401
        phases, first = begun
        text = splitter.tokens(first) if isinstance(first, list) else first
        self.chunk = FirstChunk(phases=phases, first=text)
        self._items = items
        self._splitter = splitter
        self._telling: asyncio.Future[None] | None = None
        self._begun = False
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()

    def forward(self, reader: AnswerReader) -> None:
        self._telling = asyncio.create_task(self._tell(reader))

    def hold(self, *, on: bool) -> None:
        if on:
            self._may_go_on.clear()
        else:
            self._may_go_on.set()

    def close(self) -> None:
        if self._telling is None:
            self._telling = asyncio.ensure_future(self._items.aclose())
        elif self._begun:
            self._telling.cancel()

    async def _tell(self, reader: AnswerReader) -> None:
        self._begun = True
        error: Exception | None = None
        async with aclosing(self._items):
            try:
                async for events in self._items:
                    if text := self._splitter.tokens(events):
                        reader.events(text.encode())
                    await self._may_go_on.wait()
            except Exception as failed:  # noqa: BLE001  (told to the reader)
                error = failed
        said = self._splitter
        reader.ended(AnswerEnd(text=said.ending, usage=said.usage, error=error))


@dataclass
class FakeServers:
    """
    Answers every request with as many tokens as it asks for.

    Attributes:
        ttft_s, itl_s: pace of the answers.
        refusal: what every request is answered with, if anything.
        refuses: the domain that does so; all of them if it is `None`.
        fails_after: tokens after which an answer breaks off with an exception.
        up: replicas that run, by role and domain.
        open: answers under way.
        seen: bodies that came.
        bytes_per_token: of text.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    refusal: Refusal | None = None
    refuses: str | None = None
    fails_after: int | None = None
    up: dict[tuple[str, str], int] = field(
        default_factory=lambda: {("prefill", "d0"): 1, ("decode", "d0"): 1}
    )
    open: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    path: str = "remote"
    bytes_per_token: int = 4

    async def answer(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[Any] | None = None
    ) -> Refusal | FakeAnswer:
        counted = with_usage(body)
        items = self.items(domain, kind, counted, tried)
        begun = await anext(items)
        if isinstance(begun, Refusal):
            await items.aclose()
            return begun
        answer = FakeAnswer(begun, items, EventSplitter(keeps_usage=counted is body))
        if isinstance(begun[1], dict):
            await items.aclose()
        return answer

    async def items(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[Any] | None = None
    ) -> AsyncGenerator[Any]:
        """Yield a refusal, or phases with what is first, then events, as a replica does."""
        assert domain in {of for _, of in self.up}
        self.seen.append(body)
        if tried is not None:
            tried.append(domain)
        self.open += 1
        try:
            if self.refusal is not None and self.refuses in {None, domain}:
                yield self.refusal
                return
            await asyncio.sleep(self.ttft_s)
            way = {"path": self.path, "prefill_replica": "" if "local" in self.path else "p"}
            phases = RequestPhases(prefill_s=self.ttft_s, decode_s=0.0, **way)
            tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
            if not body.get("stream"):
                await asyncio.sleep(self.itl_s * (tokens - 1))
                yield phases, self._whole(kind, body, tokens)
                return
            events = self._events(kind, body, tokens)
            yield phases, [await anext(events)]
            async for event in events:
                yield [event]
        finally:
            self.open -= 1

    async def _events(self, kind: str, body: dict[str, Any], tokens: int) -> AsyncGenerator[str]:
        for number in range(tokens):
            if number == self.fails_after:
                raise RuntimeError("secret detail of the engine")
            if number:
                await asyncio.sleep(self.itl_s)
            piece = f" t{number}"
            choice = {"text": piece} if kind == "completions" else {"delta": {"content": piece}}
            yield _event({"choices": [{"index": 0, **choice, "finish_reason": None}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _event({"choices": [], "usage": self._usage(kind, body, tokens)})
        yield "data: [DONE]\n\n"

    def _whole(self, kind: str, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        text = "".join(f" t{number}" for number in range(tokens))
        said = {"message": {"role": "assistant", "content": text}}
        choice = {"text": text} if kind == "completions" else said
        return {
            "id": "x",
            "object": "text_completion" if kind == "completions" else "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "length", "logprobs": None, **choice}],
            "usage": self._usage(kind, body, tokens),
        }

    def _usage(self, kind: str, body: dict[str, Any], tokens: int) -> dict[str, int]:
        """Count the tokens of text, or the ids of the only prompt."""
        prompt = body["messages"] if kind == "chat" else body["prompt"]
        ids, size_bytes = prompt_size(prompt)
        count = ids or max(1, size_bytes // self.bytes_per_token)
        return {"prompt_tokens": count, "completion_tokens": tokens, "total_tokens": count + tokens}

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        assert "prompt" in body
        return PrefillTiming(prompt_tokens=1, seconds=0.1, queue_s=0.0, step_s=0.1)

    async def running(self) -> dict[tuple[str, str], int]:
        return self.up

    async def facts(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {key: {"tp": 1} for key in self.up}

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> dict[str, list[list[float]]]:
        return {"decode": [[begin_unix_s, 0.01, 0, 0, 0, 1, 99, 0]] if end_unix_s > 10 else []}


def _event(chunk: dict[str, Any]) -> str:
    """Write a server-sent event as the engine does, without blanks."""
    whole = {"id": "x", "object": "chunk", "created": 1, "model": "demo", **chunk}
    return f"data: {json.dumps(whole, separators=(',', ':'))}\n\n"
