"""Failure 15 and 9: does splitting prefill from decode change what the model says? (float32)."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.client import ask, difference, other, send

from .bodies import CLASSES, words
from .reference import ask_bare_server, many_lengths

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.deployed import Split

    from .reference import Reference

pytestmark = pytest.mark.engine

MAX_TOKENS = 24
TOLERANCE = 1e-3
"""Of a log-probability: float32 sums in another order differ by far less."""

REFUSED = {"tools"}
"""Classes of request that need vLLM settings which are not made: a parser for the model."""

SPOILED = (2, 33, 64, 200, 768, 2024)
"""Prompt lengths: each with a block that decode does not compute itself."""


def test_reference_says_something(reference: Reference) -> None:
    """Each reference answer holds at least 8 different tokens: equality means something."""
    assert min(len(set(answer.tokens)) for answer in reference.answers) >= 8


def test_split_equals_single_engine(
    reference: Reference, split: Split, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens are equal for every prompt, and best log-probabilities agree within 1e-3."""
    _compare(split, reference, capsys)


def _compare(split: Split, reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    """Ask every prompt of the reference; say how many answers are equal, and want all to be."""
    answers = [ask(split.base_url, prompt, MAX_TOKENS, "whole") for prompt in reference.prompts]
    found = {
        len(prompt): difference(right, answer, tolerance=TOLERANCE)
        for prompt, right, answer in zip(reference.prompts, reference.answers, answers, strict=True)
    }
    worst = max(
        abs(right.best_two[i][0] - answer.best_two[i][0])
        for right, answer in zip(reference.answers, answers, strict=True)
        for i in range(MAX_TOKENS)
    )
    with capsys.disabled():
        equal = sum(text is None for text in found.values())
        sys.stdout.write(f"\nfloat32: {equal} of {len(answers)} answers equal, ")
        sys.stdout.write(f"log-probabilities within {worst:.1e}\n")
    assert {length: text for length, text in found.items() if text} == {}


@pytest.mark.campaign
def test_two_hundred_prompts(
    split: Split, demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it is for 200 prompt lengths, around every multiple of a block."""
    many = ask_bare_server(demo_model, many_lengths(200), tmp_path / "server.txt")
    _compare(split, many, capsys)


def test_a_zeroed_block_is_noticed(split: Split, reference: Reference) -> None:
    """With one KV block zeroed on the way the same check fails, and without it holds again."""
    pairs = zip(reference.prompts, reference.answers, strict=True)
    some = [(prompt, right) for prompt, right in pairs if len(prompt) in SPOILED]
    assert len(some) >= len(SPOILED)
    split("spoil", "zero")
    try:
        spoiled = [ask(split.base_url, prompt, MAX_TOKENS, "spoiled") for prompt, _ in some]
    finally:
        split("spoil", "nothing")
    again = [ask(split.base_url, prompt, MAX_TOKENS, "again") for prompt, _ in some]
    for (prompt, right), bad, good in zip(some, spoiled, again, strict=True):
        assert difference(right, bad, tolerance=TOLERANCE), len(prompt)
        assert difference(right, good, tolerance=TOLERANCE) is None, len(prompt)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_request_equals_a_single_engine(
    split: Split, reference: Reference, name: str
) -> None:
    """
    Failure 9: several answers, formats, seeds, tools: as from a bare server, by its own way.

    What vLLM refuses without settings of its own, we refuse.
    """
    asked = CLASSES[name]
    reply = send(f"{split.base_url}/v1/{asked.kind}", {"model": "demo", **asked.body})
    right = reference.classes[name]
    if "error" in right:
        assert (name in REFUSED, reply.status) == (True, 400), right
        return
    assert reply.status == 200, reply.body
    assert other(right, reply.body, TOLERANCE) is None
    assert reply.path == asked.path


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", [name for name in CLASSES if CLASSES[name].path == "remote" and name not in REFUSED]
)
def test_remote_equals_local(split: Split, name: str) -> None:
    """What decode answers with a fetched KV cache it answers with one that it computed itself."""
    asked = CLASSES[name]
    kind = "chat" if asked.kind.startswith("chat") else "completions"
    routing = {"local_threshold_tokens": 2000}
    body = {**asked.body, "prompt": prompt} if (prompt := _one(asked.body)) else asked.body
    phases, local = split("answer", kind, {**body, "cache_salt": "computed"}, 9.0, routing)
    reply = send(f"{split.base_url}/v1/{asked.kind}", {**asked.body, "cache_salt": "fetched"})
    assert (phases["path"], reply.path) == ("local", "remote"), reply.body
    assert other(local, reply.body, TOLERANCE) is None


def _one(body: dict[str, Any]) -> object:
    """Return the prompt out of a list of one, as `serving.request.validation.check` does."""
    prompt = body.get("prompt")
    return prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], list) else prompt


@pytest.mark.parametrize("name", ["plain", "n", "prompt list", "stop", "seed", "chat"])
def test_a_stream_says_what_the_whole_answer_says(
    split: Split, reference: Reference, name: str
) -> None:
    """The pieces of a stream, put together by their index, are the whole answer's texts."""
    asked = CLASSES[name]
    body = {"model": "demo", "stream": True, **asked.body}
    reply = send(f"{split.base_url}/v1/{asked.kind}", body)
    assert reply.done, reply.error
    texts: dict[int, str] = {}
    for event in reply.events[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + _text(choice)
    whole = {choice["index"]: _text(choice) for choice in reference.classes[name]["choices"]}
    assert texts == whole


@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        ("completions", {"prompt": words(50, 31)}, "local"),
        ("completions", {"prompt": words(51, 32)}, "remote"),
        ("completions", {"prompt": "ba" * 20}, "local"),
        ("completions", {"prompt": "0" * 60}, "remote"),
        ("chat", {"messages": [{"role": "user", "content": "ba"}]}, "local"),
        ("chat", {"messages": [{"role": "user", "content": "0" * 60}]}, "remote"),
    ],
)
def test_short_prompts_stay(split: Split, kind: str, body: dict[str, object], path: str) -> None:
    """Up to the plan's threshold, in tokens however written, decode computes a prompt itself."""
    routing = {"local_threshold_tokens": 50}
    phases, *answers = split("answer", kind, {**body, "max_tokens": 2}, 9.0, routing)
    assert answers, phases
    assert (phases["path"], phases["reason"]) == (path, "short" if path == "local" else "")
    assert answers[0]["usage"]["completion_tokens"] == 2


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    said = choice.get("delta") or choice["message"]
    assert isinstance(said, dict)
    return said.get("content") or ""
