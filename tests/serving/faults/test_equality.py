"""Failure 15 and 9: does splitting prefill from decode change what the model says? (float32)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.client import other, send
from tests.serving.deployed import Split

from .bodies import CLASSES, words
from .reference import TOLERANCE, Reference, ask_bare_server, many_lengths

pytestmark = pytest.mark.engine

REFUSED = {"tools"}
"""Classes of request that need vLLM settings which are not made: a parser for the model."""

SPOILED = (2, 33, 64, 200, 768, 2024)
"""Prompt lengths: each with a block that decode does not compute itself."""


def test_reference_says_something(reference: Reference) -> None:
    """Each reference answer holds at least 8 different tokens: equality means something."""
    assert min(len(set(answer.tokens)) for answer in reference.answers) >= 8


def test_split_equals_single_engine(reference: Reference, split: Split) -> None:
    """Tokens are equal for every prompt, and best log-probabilities agree within 1e-3."""
    assert reference.differences(split.base_url, "whole") == {}


@pytest.mark.campaign
def test_two_hundred_prompts(split: Split, demo_model: Path, tmp_path: Path) -> None:
    """So it is for 200 prompt lengths, around every multiple of a block."""
    many = ask_bare_server(demo_model, many_lengths(200), tmp_path / "server.txt")
    assert many.differences(split.base_url, "whole") == {}


def test_a_zeroed_block_is_noticed(split: Split, reference: Reference) -> None:
    """With one KV block zeroed on the way the same check fails, and without it holds again."""
    split("spoil", "zero")
    try:
        spoiled = reference.differences(split.base_url, "spoiled", SPOILED)
    finally:
        split("spoil", "nothing")
    assert sorted(spoiled) == [*SPOILED]
    assert reference.differences(split.base_url, "again", SPOILED) == {}


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_request_equals_a_single_engine(
    split: Split, reference: Reference, name: str
) -> None:
    """Failure 9: each is answered as by a bare server, by its own way, or refused by both."""
    asked = CLASSES[name]
    reply = send(f"{split.base_url}/v1/{asked.kind}", {"model": "demo", **asked.body})
    right = reference.classes[name]
    if "error" in right:
        assert (name in REFUSED, reply.status) == (True, 400), right
        return
    assert reply.status == 200, reply.body
    assert other(right, reply.body, TOLERANCE) is None
    assert reply.path == asked.path


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
