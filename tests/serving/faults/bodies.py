"""A request of each class, and the way that it should take."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

GREEDY = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
SEEDED = {"temperature": 0.9, "seed": 7, "max_tokens": 24, "return_token_ids": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "say", "parameters": SCHEMA}}
COMPLETIONS, CHAT = "completions", "chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request; `path` is what its answer's header should say."""

    kind: str
    body: dict[str, Any]
    path: str = "remote"


def words(length: int, seed: int) -> list[int]:
    """Return a prompt of words that the demo model knows."""
    rng = random.Random(seed)  # noqa: S311
    return [rng.randrange(2361, 4361) for _ in range(length)]


def _completion(number: int, path: str = "remote", /, **body: object) -> Asked:
    """Return a completion of a prompt of 100 words."""
    return Asked(kind=COMPLETIONS, body={"prompt": words(100, number), **body}, path=path)


def _chat(content: str, path: str = "remote", /, **body: object) -> Asked:
    messages = [{"role": "user", "content": content}]
    return Asked(kind=CHAT, body={"messages": messages, **body}, path=path)


CLASSES: dict[str, Asked] = {
    "plain": _completion(1, **GREEDY),
    "n": _completion(2, "local; reason=n", n=3, **SEEDED),
    "best_of": _completion(4, "local; reason=n", n=2, best_of=2, **SEEDED),
    "prompt list": Asked(
        kind=COMPLETIONS,
        body={"prompt": [words(40, 5), words(33, 6)], **GREEDY},
        path="local; reason=prompt-list",
    ),
    "text list": Asked(
        kind=COMPLETIONS,
        body={"prompt": ["one two three", "four"], **GREEDY},
        path="local; reason=prompt-list",
    ),
    "list of one": Asked(kind=COMPLETIONS, body={"prompt": [words(50, 7)], **GREEDY}),
    "prompt_logprobs": _completion(8, "local; reason=prompt-logprobs", prompt_logprobs=2, **GREEDY),
    "echo": _completion(9, "local; reason=echo", echo=True, logprobs=2, **GREEDY),
    "score": _completion(
        10, "local; reason=echo", echo=True, logprobs=1, temperature=0, max_tokens=0
    ),
    "beam search": _completion(
        11, "local; reason=beam-search", use_beam_search=True, n=2, temperature=0, max_tokens=8
    ),
    "stop": _completion(12, stop=["a"], **GREEDY),
    "seed": _completion(13, **SEEDED),
    "logprobs": _completion(14, logprobs=5, **GREEDY),
    "min_tokens": _completion(15, min_tokens=24, **GREEDY),
    "logit_bias": _completion(16, logit_bias={"2400": 100}, **GREEDY),
    "regular expression": _completion(17, structured_outputs={"regex": "( [a-z]{4}){5}"}, **GREEDY),
    "chat": _chat("hello there", **GREEDY),
    "chat with n": _chat("hello there", "local; reason=n", n=2, **SEEDED),
    "chat logprobs": _chat("hello you", logprobs=True, top_logprobs=3, **GREEDY),
    "response_format": _chat(
        "say it as JSON",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "said", "schema": SCHEMA, "strict": True},
        },
        **GREEDY,
    ),
    "tools, none wanted": _chat("say it", tools=[TOOL], tool_choice="none", **GREEDY),
    "tools": _chat(
        "say it",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "say"}},
        **GREEDY,
    ),
}
