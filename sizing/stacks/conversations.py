"""Conversations as ShareGPT and OpenAI write them: characters of prompts and answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.errors import Fault, InputError
from minicluster.workload.records import begins_as_json, flat, read_records
from minicluster.workload.trace_formats import meaning
from minicluster.workload.trace_requests import media

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
SPEAKERS = {
    "gpt assistant chatgpt bing bard model ai bot function_call": True,
    "human user system developer prompter tool function observation function_response"
    " tool_response": False,
}
ANSWERS = {who: answers for names, answers in SPEAKERS.items() for who in names.split()}
"""Whether it is an answer what they say; `function_call` is the model's call of a tool."""
BESIDE = ("function_call", "tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of what a model says beside its content."""
PARTS = ("text", "value", "content", "thinking", "reasoning")
"""Keys of the text of a part."""
MARK = re.compile(
    r"(^<(image|video|audio)>|<(image|video|audio)>$)(?!.*</(video|audio)>)",
    re.DOTALL | re.MULTILINE,
)
"""What stands at an end of a line for what is no text; HTML closes its tags."""


class Read(NamedTuple):
    """
    Answers of a file.

    Attributes:
        lengths: characters of the prompt, which is all that came before, and of the answer.
        left_out: number of other answers, by the reason.
        unread: keys that are not read.
    """

    lengths: list[tuple[int, int]]
    left_out: Counter[str]
    unread: dict[str, None]


def is_conversation(path: Path, text: str) -> bool:
    """Say whether the first record of a file has turns, and no counts of tokens."""
    if not begins_as_json(text):
        return False
    _, first = next(read_records(path, EXPECTED), ("", {}))
    meanings = {field.what for key, _ in flat(first) if (field := meaning(key)) is not None}
    return _key(first) is not None and "prompt" not in meanings


def read_answers(path: Path, *, skip_images: bool = False) -> Read:
    """
    Return the answers of all conversations.

    Args:
        skip_images: leave out those to images instead of refusing them.

    Raises:
        InputError: another file, a speaker of no known name, or content of no known kind.
    """
    read = Read([], Counter(), {})
    for place, record in read_records(path, EXPECTED):
        key = _key(record)
        if key is None:
            keys = ", ".join(record) or "none"
            raise InputError(place, Fault(f"is a record with the keys {keys}"[:120]), EXPECTED)
        others = {name: value for name, value in record.items() if name != key}
        read.unread.update(dict.fromkeys(others.keys() - {*BEFORE}))
        for before, answer, is_text in _answers(place, others, record[key], read.unread):
            if not is_text and not skip_images:
                expected = "conversations of text: characters do not say what these cost"
                way_out = "--skip-images leaves such answers out"
                raise InputError(
                    place, Fault("is an answer to images, audio or video"), expected, way_out
                )
            if is_text and before and answer:
                read.lengths.append((before, answer))
            else:
                why = "that are empty, or to nothing" if is_text else "to images, audio or video"
                read.left_out[f"answers {why}"] += 1
    return read


def _key(record: Mapping[str, Any]) -> str | None:
    return next((key for key in TURNS if isinstance(record.get(key), list)), None)


def _answers(
    place: str, others: Mapping[str, Any], turns: list[Any], unread: dict[str, None]
) -> Iterator[tuple[int, int, bool]]:
    """Yield characters before and of each answer, and whether all was text; note keys of turns."""
    before = sum(len(_text(others[key])) for key in BEFORE if others.get(key))
    is_text = media(flat(others)) is None
    for turn in turns:
        if not isinstance(turn, dict):
            raise InputError(place, turn, EXPECTED)
        rest = dict(turn)
        who = rest.pop("from", rest.pop("role", None))
        content = rest.pop("value", rest.pop("content", None))
        beside = sum(len(_text(value)) for key in BESIDE if (value := rest.pop(key, None)))
        characters = beside + (0 if content is None and beside else _characters(place, content))
        unread.update({f"{key} of a turn": None for key, value in rest.items() if value})
        marks = (MARK.search(text) for _, text in flat(turn) if isinstance(text, str))
        is_text = is_text and media([*turn.items(), *flat(turn)]) is None and not any(marks)
        answers = ANSWERS.get(str(who).lower())
        if answers is None:
            raise InputError(f"{place}: from or role", who, f"one of {', '.join(sorted(ANSWERS))}")
        if answers:
            yield before, characters, is_text
        before += characters


def _characters(place: str, content: Any) -> int:  # noqa: ANN401  (JSON)
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(_characters(place, part) for part in content)
    if isinstance(content, dict):
        if content.get("type") in {"tool_use", "tool_call"}:
            return len(_text(content))
        inner = next((content[key] for key in PARTS if content.get(key) is not None), None)
        if inner is not None or media(flat(content)) is not None:
            return _characters(place, inner or "")
    expected = "text, or a list of parts of text"
    raise InputError(f"{place}: value or content", content, expected)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
