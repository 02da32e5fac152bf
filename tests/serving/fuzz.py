"""Requests to an endpoint, most of them broken, and what is wrong with the answers they get."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

AT_ONCE = 4
VALID_SHARE = 0.2
MAX_TOKENS = 2

SHORT = {"max_tokens": MAX_TOKENS, "temperature": 0}
PARTS = [{"type": "text", "text": "hello"}]
HI = [{"role": "user", "content": "hi"}]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": "Hello there", **SHORT}),
    ("completions", {"prompt": [2500, 2600, 2700], **SHORT}),
    ("completions", {"prompt": ["a b c"], **SHORT, "seed": 3}),
    ("completions", {"prompt": "x y", **SHORT, "min_tokens": 2, "n": 1}),
    ("completions", {"prompt": "abc", "max_tokens": 1, "temperature": 0, "logprobs": 1}),
    ("chat/completions", {"messages": HI, **SHORT}),
    (
        "chat/completions",
        {"messages": TALK, "max_completion_tokens": MAX_TOKENS, "temperature": 0, "stop": ["\n"]},
    ),
)

FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "n", "best_of", "seed", "stop", "stream"),
    *("stream_options", "logprobs", "top_logprobs", "echo", "logit_bias", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "response_format", "structured_outputs"),
    *("tools", "tool_choice", "user", "ignore_eos", "prompt_logprobs", "kv_transfer_params"),
    *("vllm_xargs", "request_id", "prompt_embeds", "bad_words", "allowed_token_ids"),
    *("truncate_prompt_tokens", "chat_template", "chat_template_kwargs", "suffix"),
    *("stop_token_ids", "include_stop_str_in_output", "priority", "cache_salt", "documents"),
    *("add_generation_prompt", "continue_final_message", "min_p", "length_penalty"),
    *("use_beam_search", "guided_json", "guided_regex", "mm_processor_kwargs"),
    *("skip_special_tokens", "return_token_ids", "reasoning_effort", "parallel_tool_calls"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 0.5, -0.1, 1e308, 3.7, "", "x"),
    *("\ud800", "\x00", "1", "auto", "null", "x" * 5000),
    *([], [None], [[]], [0], [-1], [2**40], ["a", 1]),
    *({}, {"a": 1}, {"type": "json_schema"}, {"type": "json_object"}, {"5": 200}, {"x": None}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
    {"regex": "(((("},
    {"json": "{"},
    {"include_usage": "maybe"},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}],
    [{"role": "nobody", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
    [{"role": "user"}],
    [{"role": "tool", "content": "x", "tool_call_id": 3}],
    "{{ 7 * 7 }}{% for x in range(9) %}x{% endfor %}",
    "{% raise %}",
)


NAMED = re.compile(r"\b(" + "|".join((*FIELDS, "body", "role", "content")) + r")\b")
"""A field as a word of its own; `body` where there are no fields to name."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: path below `/v1/`, bytes, and which of `VALID` it is, if any."""

    path: str
    raw: bytes
    valid: int | None


def fuzz(
    url: str, count: int, seed: int, *, keep: Collection[str] = ()
) -> tuple[Counter[int], list[str]]:
    """
    Send so many requests to an endpoint, some at a time; return statuses and complaints.

    Fields in *keep* are as in a valid request.
    """
    statuses, complaints = Counter[int](), list[str]()
    right: dict[int, str] = {}
    waiting = requests(count, random.Random(seed), keep)  # noqa: S311

    async def client(session: aiohttp.ClientSession) -> None:
        for sent in waiting:
            async with session.post(f"{url}/v1/{sent.path}", data=sent.raw) as answer:
                statuses[answer.status] += 1
                if found := complaint(sent, answer.status, await answer.read(), right):
                    complaints.append(f"{sent.path} {sent.raw[:400]!r}: {found}")

    async def send() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await asyncio.gather(*(client(session) for _ in range(AT_ONCE)))

    asyncio.run(send())
    return statuses, complaints


def requests(count: int, rng: random.Random, keep: Collection[str] = ()) -> Iterator[Sent]:
    """Return *count* requests, `VALID_SHARE` of them valid."""
    for _ in range(count):
        which = rng.randrange(len(VALID))
        path, body = VALID[which]
        if rng.random() < VALID_SHARE:
            yield Sent(path, json.dumps(body).encode(), which)
            continue
        mutated = copy.deepcopy(body)
        for _ in range(rng.randint(1, 3)):
            _mutate(mutated, rng)
        mutated |= {name: body[name] for name in body if name in keep}
        raw = json.dumps(mutated, allow_nan=True).encode()
        if rng.random() < 0.15:
            raw = _damaged(raw, rng)
        yield Sent(path if rng.random() < 0.9 else rng.choice(VALID)[0], raw, None)


def _mutate(body: dict[str, Any], rng: random.Random) -> None:
    """Replace, add or drop a field; or put something very deep into one, or not a number."""
    there = sorted(body) or FIELDS
    match rng.choice(("replace", "add", "add", "drop", "nest")):
        case "replace":
            body[rng.choice(there)] = copy.deepcopy(rng.choice(VALUES))
        case "add":
            body[rng.choice(FIELDS)] = copy.deepcopy(rng.choice(VALUES))
        case "drop":
            body.pop(rng.choice(there), None)
        case "nest":
            deep: Any = float("nan")
            for _ in range(rng.choice((0, 3, 40, 900))):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            body[rng.choice(FIELDS)] = deep


def _damaged(raw: bytes, rng: random.Random) -> bytes:
    """Cut, repeat or overwrite bytes."""
    at = rng.randrange(len(raw))
    other = bytes((rng.randrange(256),))
    cut_or_twice = (raw[:at], raw[at:], raw + raw, b"")
    other_bytes = (raw[:at] + other + raw[at + 1 :], b"[" * 3000 + raw, b"\xef\xbb\xbf" + raw)
    return rng.choice(cut_or_twice + other_bytes)


def complaint(sent: Sent, status: int, answer: bytes, right: dict[int, str]) -> str | None:
    """
    Say what is wrong with an answer; `None`: nothing.

    Args:
        sent: the request.
        status: of the answer.
        answer: its body.
        right: text of the answer to each valid request, filled by the first.
    """
    if status >= 500:
        return f"{status}: {answer[:300]!r}"
    if sent.valid is not None:
        if status != 200:
            return f"valid, and {status}: {answer[:300]!r}"
        text = json.dumps([_said(choice) for choice in json.loads(answer)["choices"]])
        return None if right.setdefault(sent.valid, text) == text else f"{text}, not as before"
    if status == 200:
        return None  # what was changed did not matter
    error = json.loads(answer)["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"another shape: {error}"
    if error["param"] is None and not NAMED.search(error["message"]):
        return f"{status} names no field: {error['message']!r}"
    return f"a traceback: {error['message']!r}" if "Traceback" in error["message"] else None


def _said(choice: dict[str, Any]) -> Any:  # noqa: ANN401
    return choice.get("text") or choice.get("message", {}).get("content")


CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
)


def schemathesis(url: str, *, examples: int) -> tuple[int, str]:
    """
    Send requests that schemathesis generates from the endpoint's own schema.

    Returns:
        Its exit code and what it said last, after *examples* an operation at least.
    """
    command = [
        *(Path(sys.executable).parent / "st", "run", f"{url}/openapi.json", "--seed", "7"),
        *("--max-examples", str(examples), "--checks", ",".join(CHECKS)),
        *("--request-timeout", "90"),  # a whole context of answer, on one core
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout[-600:])
    return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]
