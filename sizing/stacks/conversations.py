"""Conversations as ShareGPT and OpenAI write them: characters of prompts and answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.workload.records import begins_as_json, flat, read_records
from minicluster.workload.trace_formats import meaning
from minicluster.workload.trace_requests import said

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

EXPECTED = (
    'conversations: JSON objects, one a line or a list of {"conversations": [{"from": …, "value":'
    ' …}]}, or with "messages" of role and content'
)
TURNS = ("conversations", "conversation", "messages")
"""Keys of the turns: of ShareGPT; of LMSYS and WildChat; of OpenAI."""
BEFORE = ("system", "tools", "functions")
"""Keys of what stands before the first turn."""
ANSWERING = frozenset(
    {"gpt", "assistant", "chatgpt", "bing", "bard", "model", "ai", "bot", "function_call"}
)
"""Who answers; `function_call` is the model's call of a tool."""
ASKING = frozenset(
    {"human", "user", "system", "developer", "prompter", "tool", "function", "observation",
     "function_response", "tool_response"}
)  # fmt: skip
CALLS = ("function_call", "tool_calls", "reasoning_content", "reasoning")
"""Keys of what a model says beside its content."""
MARKS = ("<image>", "<video>", "<audio>")
"""What stands in a text for what is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    One answer.

    Attributes:
        before, own: characters of the prompt, which is all that came before, and of the answer.
        is_text: no image, audio or video came before.
    """

    before: int
    own: int
    is_text: bool


def is_conversation(path: Path, text: str) -> bool:
    """Say whether the first record of a file has turns, and no counts of tokens."""
    if not begins_as_json(text):
        return False
    _, first = next(read_records(path, EXPECTED), (0, {}))
    meanings = {each.what for key in flat(first) if (each := meaning(key)) is not None}
    return any(isinstance(first.get(key), list) for key in TURNS) and "prompt" not in meanings


def read_answers(path: Path, *, skip_images: bool = False) -> Iterator[Answer]:
    """
    Yield the answers of all conversations.

    Args:
        skip_images: yield those to images, too, instead of refusing them; they are no text.

    Raises:
        InputError: another file, a speaker of no known name, or content of no known kind.
    """
    for number, record in read_records(path, EXPECTED):
        place = f"{path}:{number}"
        key = next((key for key in TURNS if isinstance(record.get(key), list)), None)
        if key is None:
            found = ", ".join(record) or "no key"
            raise InputError(place, f"a record with the keys {found}"[:120], EXPECTED)
        for answer in _answers(place, record, record[key]):
            if not answer.is_text and not skip_images:
                expected = "conversations of text: characters do not say what these cost"
                way_out = "--skip-images leaves such answers out"
                raise InputError(place, "an answer to images, audio or video", expected, way_out)
            yield answer


def _answers(place: str, record: Mapping[str, Any], turns: list[Any]) -> Iterator[Answer]:
    before = sum(len(_text(record[key])) for key in BEFORE if record.get(key))
    is_text = not any(
        value for key, value in record.items() if (each := meaning(key)) and each.what == "images"
    )
    for turn in turns:
        if not isinstance(turn, dict):
            raise InputError(place, said(turn)[:80], EXPECTED)
        who = turn.get("from", turn.get("role"))
        content, only_text = _content(place, turn)
        is_text = is_text and only_text
        beside = sum(len(_text(turn[key])) for key in CALLS if turn.get(key))
        if str(who).lower() in ANSWERING:
            yield Answer(before=before, own=content + beside, is_text=is_text)
        elif str(who).lower() not in ASKING:
            expected = f"one of {', '.join(sorted(ASKING | ANSWERING))}"
            raise InputError(f"{place}: from or role", said(who), expected)
        before += content + beside


def _content(place: str, turn: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the characters of a turn, and whether it is all text."""
    content = turn.get("value", turn.get("content"))
    if content is None and any(turn.get(key) for key in CALLS):
        return 0, True
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    characters, only_text = 0, True
    for part in parts:
        text = (
            part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        )
        kind = (
            ""
            if isinstance(part, str)
            else str(part.get("type", ""))
            if isinstance(part, dict)
            else ""
        )
        if isinstance(text, str):
            characters += len(text)
            only_text = only_text and not any(mark in text for mark in MARKS)
        elif any(each in kind for each in ("image", "audio", "video", "file")):
            only_text = False
        else:
            expected = "text, or a list of parts of text"
            raise InputError(f"{place}: value or content", said(part)[:80], expected)
    return characters, only_text


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
