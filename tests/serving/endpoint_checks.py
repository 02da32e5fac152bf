"""
Checks of a running endpoint, in processes of their own: clients, fuzz.

`endpoint_checks.py fuzz URL COUNT SEED` sends mutated bodies; prints what it found as JSON.
`endpoint_checks.py openai URL MODEL KEY` uses the unmodified OpenAI client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))
from mutation import Sent, complaint, requests

AT_ONCE = 4


async def fuzz(url: str, count: int, seed: int) -> dict[str, Any]:
    """Send *count* requests, some at a time; return statuses and complaints."""
    statuses, complaints = Counter[int](), list[str]()
    right: dict[int, str] = {}
    waiting = requests(count, seed)

    async def client(session: aiohttp.ClientSession, waiting: Iterator[Sent]) -> None:
        for sent in waiting:
            async with session.post(f"{url}/v1/{sent.path}", data=sent.raw) as answer:
                body = await answer.read()
                statuses[answer.status] += 1
                if found := complaint(sent, answer.status, body, right):
                    complaints.append(f"{sent.path} {sent.raw[:400]!r}: {found}")

    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=limit) as session:
        await asyncio.gather(*(client(session, waiting) for _ in range(AT_ONCE)))
    return {
        "statuses": {str(status): n for status, n in sorted(statuses.items())},
        "complaints": len(complaints),
        "first": complaints[:20],
    }


def use_openai(url: str, model: str, key: str) -> dict[str, Any]:
    """Use the OpenAI client as its documentation does; return what it got."""
    import openai  # noqa: PLC0415

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    with client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = client.completions.create(model=model, prompt="hello", max_tokens=4, logprobs=1)
    streamed = list(client.completions.create(model=model, prompt="x", max_tokens=4, stream=True))
    refused = []
    for broken in ({"max_tokens": -1}, {"model": "gpt-9"}, {"temperature": 9}):
        try:
            client.completions.create(**{"model": model, "prompt": "x", **broken})  # type: ignore[call-overload]
        except openai.APIStatusError as error:
            refused.append([error.status_code, error.param, bool(error.request_id)])
    return {
        "models": [each.id for each in client.models.list()],
        "chat": [chat.usage and chat.usage.completion_tokens, chat.choices[0].message.role],
        "stream": chunks[-1].usage and chunks[-1].usage.completion_tokens,
        "completion": text.usage and text.usage.completion_tokens,
        "streamed": streamed[-1].choices[0].finish_reason,
        "refused": refused,
    }


if __name__ == "__main__":
    what, url, *rest = sys.argv[1:]
    if what == "fuzz":
        found = asyncio.run(fuzz(url, int(rest[0]), int(rest[1])))
    else:
        found = use_openai(url, *rest)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
