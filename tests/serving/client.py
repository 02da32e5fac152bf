"""A client of the endpoint, and how its answers are compared with a reference."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens of one greedy answer, and per token the two best log-probabilities, best first."""

    tokens: tuple[int, ...]
    best_two: tuple[tuple[float, float], ...]


def post(url: str, body: object) -> tuple[int, dict[str, Any]]:
    """Send JSON, or bytes as they are; return status and body of the answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, raw, JSON)  # noqa: S310  (our own endpoint)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def events(url: str, body: dict[str, Any]) -> list[str]:
    """Stream an answer; return the data of its server-sent events."""
    raw = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url, raw, JSON)  # noqa: S310  (our own endpoint)
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        lines = [line.decode().strip() for line in answer]
    return [line.removeprefix("data: ") for line in lines if line]


def ask(base_url: str, prompt: list[int], max_tokens: int, salt: str) -> Answer:
    """Complete a prompt greedily; what was cached under another *salt* is not used."""
    status, body = post(
        f"{base_url}/v1/completions",
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "cache_salt": salt,
        },
    )
    assert status == 200, body
    [choice] = body["choices"]
    best = [sorted(step.values(), reverse=True)[:2] for step in choice["logprobs"]["top_logprobs"]]
    return Answer(
        tokens=tuple(choice["token_ids"]), best_two=tuple((first, last) for first, last in best)
    )


def difference(reference: Answer, answer: Answer, *, tolerance: float) -> str | None:
    """
    Say where two answers differ: the first other token, or a best log-probability that is off.

    Args:
        reference: what is right.
        answer: what came.
        tolerance: allowed difference of the best log-probability of each token.
    """
    if len(reference.tokens) != len(answer.tokens):
        return f"{len(answer.tokens)} tokens instead of {len(reference.tokens)}"
    for place, (right, given) in enumerate(zip(reference.tokens, answer.tokens, strict=True)):
        off = abs(reference.best_two[place][0] - answer.best_two[place][0])
        if right != given:
            return f"token {place}: {given} instead of {right}"
        if off > tolerance:
            return f"token {place}: log-probability off by {off:.2g}"
    return None
