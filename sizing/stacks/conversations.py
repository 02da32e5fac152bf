"""Conversations as ShareGPT and OpenAI write them: characters of prompts and answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minicluster.errors import Fault, InputError
from minicluster.workload.records import begins_as_json, flat, read_records
from minicluster.workload.trace_formats import meaning

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
MEDIA = ("image", "audio", "video", "file", "document")
PARTS = ("text", "value", "content", "thinking", "reasoning")
"""Types of parts that are no text, and keys of the text of others."""
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


def read_answers(path: Path, *, skip_images: bool = False) -> tuple[list[Answer], tuple[str, ...]]:
    """
    Return the answers of all conversations, and the keys of these that are not read.

    Args:
        skip_images: return those to images, too, instead of refusing them; they are no text.

    Raises:
        InputError: another file, a speaker of no known name, or content of no known kind.
    """
    found: list[Answer] = []
    unread: dict[str, None] = {}
    for number, record in read_records(path, EXPECTED):
        place = f"{path}:{number}"
        key = next((key for key in TURNS if isinstance(record.get(key), list)), None)
        if key is None:
            keys = ", ".join(record) or "none"
            raise InputError(place, Fault(f"is a record with the keys {keys}"[:120]), EXPECTED)
        for answer in _answers(place, record, record[key]):
            if not answer.is_text and not skip_images:
                expected = "conversations of text: characters do not say what these cost"
                way_out = "--skip-images leaves such answers out"
                raise InputError(
                    place, Fault("is an answer to images, audio or video"), expected, way_out
                )
            found.append(answer)
        unread |= dict.fromkeys(record.keys() - {key, *BEFORE})
    return found, tuple(sorted(unread))


def _answers(place: str, record: Mapping[str, Any], turns: list[Any]) -> Iterator[Answer]:
    before = sum(len(_text(record[key])) for key in BEFORE if record.get(key))
    is_text = not any(
        value for key, value in record.items() if (each := meaning(key)) and each.what == "images"
    )
    for turn in turns:
        if not isinstance(turn, dict):
            raise InputError(place, turn, EXPECTED)
        who = turn.get("from", turn.get("role"))
        said_by_turn = turn.get("value", turn.get("content"))
        is_call = said_by_turn is None and any(turn.get(key) for key in CALLS)
        content, only_text = (0, True) if is_call else _content(place, said_by_turn)
        is_text = is_text and only_text
        beside = sum(len(_text(turn[key])) for key in CALLS if turn.get(key))
        if str(who).lower() in ANSWERING:
            yield Answer(before=before, own=content + beside, is_text=is_text)
        elif str(who).lower() not in ASKING:
            expected = f"one of {', '.join(sorted(ASKING | ANSWERING))}"
            raise InputError(f"{place}: from or role", who, expected)
        before += content + beside


def _content(place: str, content: Any) -> tuple[int, bool]:  # noqa: ANN401  (JSON)
    """Return the characters of a turn's content, and whether it is all text."""
    if isinstance(content, str):
        return len(content), not any(mark in content for mark in MARKS)
    if isinstance(content, list):
        parts = [_content(place, each) for each in content]
        return sum(length for length, _ in parts), all(is_text for _, is_text in parts)
    if isinstance(content, dict):
        kind = str(content.get("type", ""))
        if any(each in kind for each in MEDIA):
            return 0, False
        if kind in {"tool_use", "tool_call"}:
            return len(_text(content)), True
        inner = next((content[key] for key in PARTS if content.get(key) is not None), None)
        if inner is not None:
            return _content(place, inner)
    expected = "text, or a list of parts of text"
    raise InputError(f"{place}: value or content", content, expected)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
