"""A client that sends completions when they are due and stamps what comes back."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """
    One request.

    Attributes:
        status: of the answer; 0: it broke off.
        due_s: when it was to be sent, from the start.
        ttft_s: from then to the first token, `nan` without one.
        tpot_s: per token after the first, `nan` with fewer than two.
        answered_s: from then to the status, the whole of a refusal.
    """

    status: int
    due_s: float
    ttft_s: float
    tpot_s: float
    answered_s: float


def body(model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """Return a streamed completion of exact lengths."""
    return {
        "model": model,
        "prompt": [int(token) for token in prompt],
        "max_tokens": int(output_tokens),
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream(
    session: aiohttp.ClientSession, url: str, asked: dict[str, Any], due_s: float, start_s: float
) -> Sample:
    """Send one completion, *due_s* after *start_s* of the loop's clock."""
    await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
    stamps, tokens, ended = list[float](), 0, False
    async with session.post(f"{url}/v1/completions", json=asked) as answer:
        answered_s = time.perf_counter() - start_s - due_s
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                tokens = (chunk.get("usage") or {}).get("completion_tokens") or tokens
                if chunk.get("choices"):
                    stamps.append(time.perf_counter() - start_s - due_s)
            ended |= line.startswith(b"data: [DONE]")
    complete = answer.status != 200 or (ended and tokens == asked["max_tokens"])  # noqa: PLR2004
    return Sample(
        status=answer.status if complete else 0,
        due_s=due_s,
        ttft_s=stamps[0] if stamps else float("nan"),
        tpot_s=(stamps[-1] - stamps[0]) / (tokens - 1) if tokens > 1 else float("nan"),
        answered_s=answered_s,
    )


async def open_loop(
    url: str, asked: Sequence[dict[str, Any]], due_s: Sequence[float]
) -> list[Sample]:
    """Send every completion when it is due, whatever became of those before."""
    connector = aiohttp.TCPConnector(limit=0)
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        start_s = time.perf_counter() + 0.2
        waiting = zip(asked, due_s, strict=True)
        return await asyncio.gather(
            *(stream(session, url, each, float(due), start_s) for each, due in waiting)
        )


def percentile_ms(values_s: Sequence[float], share: float) -> float:
    """Return a percentile in milliseconds, as an upper order statistic."""
    return float(np.quantile(values_s, share, method="higher")) * 1e3
