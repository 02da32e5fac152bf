"""A client of the endpoint, and how its answers are compared with a reference."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

JSON = {"Content-Type": "application/json"}
OF_A_RUN = {"id", "created", "system_fingerprint", "metrics", "kv_transfer_params", "model"}
"""Fields of an answer that say when and by whom it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens of one greedy answer, and per token the two best log-probabilities, best first."""

    tokens: tuple[int, ...]
    best_two: tuple[tuple[float, float], ...]


@dataclass(slots=True, kw_only=True)
class Reply:
    """
    What a client saw of one request.

    Attributes:
        status: of the answer; 0: the connection broke before.
        headers: names in lower case.
        body: of an answer that is no stream.
        events: data of the server-sent events.
        seconds: from the request to the end.
        first_s: from the request to the first event.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    seconds: float = 0.0
    first_s: float = 0.0

    @property
    def done(self) -> bool:
        if self.events:
            return self.events[-1] == "[DONE]" and not self.error
        return self.status == 200

    @property
    def error(self) -> str | None:
        """What the endpoint said went wrong, wherever it said so."""
        spoken = [self.body, *(json.loads(e) for e in self.events if e != "[DONE]")]
        return next((str(each["error"]["message"]) for each in spoken if "error" in each), None)

    @property
    def path(self) -> str:
        """The way that the answer's header tells."""
        return self.headers.get("x-minicluster-path", "")


def post(url: str, body: object) -> tuple[int, dict[str, Any]]:
    """Send JSON, or bytes as they are; return status and body of the answer."""
    reply = send(url, body)
    return reply.status, reply.body


def answers(base_url: str) -> bool:
    """Tell whether the engines work."""
    status, body = post(f"{base_url}/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    return status == 200 and body["usage"]["completion_tokens"] == 3


def send(url: str, body: object, timeout_s: float = 120.0) -> Reply:
    """Send JSON, or bytes as they are; return all that came, however it ended."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, raw, JSON)  # noqa: S310  (our own endpoint)
    reply, started = Reply(), time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            reply.status, reply.headers = answer.status, _lower(answer.headers)
            if "event-stream" not in reply.headers.get("content-type", ""):
                reply.body = json.loads(answer.read())
            else:
                for line in answer:
                    if line.startswith(b"data: "):
                        reply.first_s = reply.first_s or time.monotonic() - started
                        reply.events.append(line[6:].decode().strip())
    except urllib.error.HTTPError as error:
        with error:
            reply.status, reply.headers = error.code, _lower(error.headers)
            reply.body = json.loads(error.read())
    except (OSError, HTTPException):  # the answer is cut where it is
        pass
    reply.seconds = time.monotonic() - started
    return reply


def begin(base_url: str, body: dict[str, Any]) -> socket.socket:
    """Send a completion; return the connection, by which its answer comes."""
    address = urlsplit(base_url)
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    client = socket.create_connection((address.hostname, address.port))
    client.sendall(head.encode() + raw)
    return client


def _lower(headers: Any) -> dict[str, str]:  # noqa: ANN401
    return {name.lower(): value for name, value in headers.items()}


def events(url: str, body: dict[str, Any]) -> list[str]:
    return send(url, {**body, "stream": True}).events


def greedy(prompt: list[int], max_tokens: int, salt: str) -> dict[str, Any]:
    """Return the body of a greedy completion; what was cached under another *salt* is not used."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def ask(base_url: str, prompt: list[int], max_tokens: int, salt: str) -> Answer:
    status, body = post(f"{base_url}/v1/completions", greedy(prompt, max_tokens, salt))
    assert status == 200, body
    return answer_of(body)


def answer_of(body: dict[str, Any]) -> Answer:
    """Take tokens and log-probabilities out of the answer to a `greedy` request."""
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


def other(right: Any, given: Any, tolerance: float, place: str = "") -> str | None:  # noqa: ANN401
    """Say where two answers of any shape differ, but for what is of their run; `None`: nowhere."""
    if isinstance(right, dict) and isinstance(given, dict):
        names = (set(right) | set(given)) - OF_A_RUN
        return _first(
            other(right.get(name), given.get(name), tolerance, f"{place}.{name}") for name in names
        )
    if isinstance(right, list) and isinstance(given, list) and len(right) == len(given):
        return _first(
            other(one, two, tolerance, f"{place}[{at}]")
            for at, (one, two) in enumerate(zip(right, given, strict=True))
        )
    if isinstance(right, float) and isinstance(given, float):
        return None if abs(right - given) <= tolerance else f"{place}: {given} instead of {right}"
    return None if right == given else f"{place}: {given!r} instead of {right!r}"


def _first(found: Any) -> str | None:  # noqa: ANN401
    return next((each for each in found if each), None)
