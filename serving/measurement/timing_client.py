"""The client that times a running engine: it streams completions with a time per token."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import numpy as np

from minicluster.errors import TargetFailed
from minicluster.http_client.sse import DONE, EventParser

FIRST_ID = 300
"""First token id of prompts, beyond special tokens and single bytes."""

STREAMED = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@dataclass(slots=True)
class TimedStream:
    """
    The times of one streamed completion, filled while it runs.

    Attributes:
        stamps: (monotonic time, tokens so far) of each chunk that brought tokens.
        started: set at the first token.
    """

    sent_s: float = 0.0
    stamps: list[tuple[float, int]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.stamps[0][0] - self.sent_s

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self.stamps[-1][1] if self.stamps else 0

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Tokens that arrived after *start_s* and not after *end_s*."""
        arrived = [tokens for at, tokens in self.stamps if at <= end_s]
        earlier = [tokens for at, tokens in self.stamps if at <= start_s]
        return max(arrived, default=0) - max(earlier, default=0)


@dataclass(frozen=True, slots=True)
class TimingClient:
    """
    A client that sends completions to one endpoint.

    Its prompts, ids below *vocab_size*, are all different, so that no prefix cache is hit.
    """

    session: aiohttp.ClientSession
    base_url: str
    model: str
    vocab_size: int
    rng: np.random.Generator

    async def stream(
        self, input_tokens: int, output_tokens: int, into: TimedStream | None = None
    ) -> TimedStream:
        """
        Stream one completion of exact lengths; *into* is filled meanwhile.

        Raises:
            TargetFailed: the endpoint answered an error, or ended the stream early.
        """
        url = f"{self.base_url}/v1/completions"
        body = self._body(input_tokens, output_tokens) | STREAMED
        stream = into or TimedStream()
        stream.sent_s = time.monotonic()
        async with self.session.post(url, json=body) as answer:
            await _check(answer)
            parser = EventParser()
            async for received in answer.content.iter_any():
                now = time.monotonic()
                for event in parser.feed(received):
                    tokens = 0 if event == DONE else _tokens(json.loads(event), url)
                    if tokens > stream.tokens:
                        stream.stamps.append((now, tokens))
                        stream.started.set()
        if stream.tokens != output_tokens:
            raise TargetFailed(f"{url} sent {stream.tokens} of {output_tokens} tokens")
        return stream

    async def prefill(self, input_tokens: int) -> float:
        """Return the seconds of one prompt through the prefill pool alone, there and back."""
        url = f"{self.base_url}/internal/prefill"
        sent = time.monotonic()
        async with self.session.post(url, json=self._body(input_tokens, 1)) as answer:
            await _check(answer)
            await answer.read()
        return time.monotonic() - sent

    def _body(self, input_tokens: int, output_tokens: int) -> dict[str, Any]:
        ids = self.rng.integers(FIRST_ID, self.vocab_size, size=input_tokens)
        return {
            "model": self.model,
            "prompt": ids.tolist(),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != HTTPStatus.OK:
        text = (await answer.text())[:300]
        raise TargetFailed(f"{answer.url} answered {answer.status}: {text}")


def _tokens(chunk: dict[str, Any], url: str) -> int:
    if "error" in chunk:
        raise TargetFailed(f"{url}: {chunk['error'].get('message', chunk['error'])}")
    return int((chunk.get("usage") or {}).get("completion_tokens") or 0)
