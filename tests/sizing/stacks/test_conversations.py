"""Conversations of every spelling: what is a prompt, what an answer, what neither; or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minicluster.errors import InputError
from minicluster.workload.trace_options import TraceReading
from sizing.stacks.traffic import read_traffic

ASKED, SAID = "q" * 40, "a" * 20


def talk(*turns: tuple[str, Any], who: str = "from", what: str = "value") -> list[dict[str, Any]]:
    return [{who: name, what: content} for name, content in turns]


PAIR = talk(("human", ASKED), ("gpt", SAID))
CHAT = talk(("user", ASKED), ("assistant", SAID), who="role", what="content")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
CALL: list[dict[str, Any]] = [{"role": "user", "content": ASKED},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "r" * 8},
        {"role": "assistant", "content": SAID}]  # fmt: skip
CALL_CHARACTERS = len(json.dumps(CALL[1]["tool_calls"]))

READ: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "ShareGPT": ({"conversations": PAIR}, [(40, 20)]),
    "OpenAI's messages": ({"messages": CHAT}, [(40, 20)]),
    "LMSYS and WildChat": ({"conversation": CHAT, "language": "English"}, [(40, 20)]),
    "a system prompt beside": ({"system": "s" * 100, "conversations": PAIR}, [(140, 20)]),
    "tools beside": ({"tools": "t" * 60, "conversations": PAIR}, [(100, 20)]),
    "a system turn": ({"conversations": talk(("system", "s" * 10)) + PAIR}, [(50, 20)]),
    "a call of a function": (
        {
            "conversations": talk(
                ("human", ASKED),
                ("function_call", "f" * 12),
                ("observation", "o" * 8),
                ("gpt", SAID),
            )
        },
        [(40, 12), (60, 20)],
    ),
    "OpenAI's tool calls": (
        {"messages": CALL},
        [(40, CALL_CHARACTERS), (48 + CALL_CHARACTERS, 20)],
    ),
    "parts of text": (
        {
            "messages": talk(
                (
                    "user",
                    [{"type": "text", "text": ASKED[:30]}, {"type": "text", "text": ASKED[30:]}],
                ),
                ("assistant", SAID),
                who="role",
                what="content",
            )
        },
        [(40, 20)],
    ),
    "capitals": ({"conversations": talk(("Human", ASKED), ("Assistant", SAID))}, [(40, 20)]),
    "a tag of HTML": (
        {"conversations": talk(("human", "<video>\nx</video>" + "q" * 23), ("gpt", SAID))},
        [(40, 20)],
    ),
    "a list in a page": ({"data": [{"messages": CHAT}]}, [(40, 20)]),
    "Ollama's thinking": (
        {"messages": [CHAT[0], CHAT[1] | {"thinking": "r" * 16}]},
        [(40, 36)],
    ),
    "reasoning beside": (
        {"messages": [CHAT[0], CHAT[1] | {"reasoning_content": "r" * 16}]},
        [(40, 36)],
    ),
}


@pytest.mark.parametrize("as_lines", [False, True])
@pytest.mark.parametrize(("record", "answers"), READ.values(), ids=READ)
def test_an_answer_is_to_all_before_it(
    tmp_path: Path, record: dict[str, Any], answers: list[tuple[int, int]], *, as_lines: bool
) -> None:
    """As a list, and a record a line."""
    file = tmp_path / "conversations"
    text = json.dumps(record) + "\n" + json.dumps(record) if as_lines else json.dumps([record] * 2)
    file.write_text(text)
    found = read_traffic(file, characters_per_token=1)
    assert found.requests == 2 * len(answers)
    assert found.lengths == tuple(sorted((*pair, 2) for pair in answers))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image in a part": (
        {
            "messages": talk(
                ("user", [IMAGE, {"type": "text", "text": ASKED}]),
                ("assistant", SAID),
                who="role",
                what="content",
            )
        },
        "--skip-images",
    ),
    "images of a turn": (
        {"messages": [CHAT[0] | {"images": ["iVBORw0"]}, CHAT[1]]},
        "--skip-images",
    ),
    "a spoken answer": (
        {"messages": [CHAT[0], CHAT[1] | {"audio": {"id": "a"}}]},
        "--skip-images",
    ),
    "an image beside": ({"image": "coco/1.jpg", "conversations": PAIR}, "--skip-images"),
    "a mark for an image": (
        {"conversations": talk(("human", "<image>\n" + ASKED), ("gpt", SAID))},
        "--skip-images",
    ),
    "someone else": (
        {"conversations": talk(("human", ASKED), ("narrator", SAID))},
        "is 'narrator'",
    ),
    "no text": ({"conversations": talk(("human", 3), ("gpt", SAID))}, "value or content is 3"),
    "no turns": ({"conversations": ["hello"]}, "is 'hello'"),
    "no answer": ({"messages": CHAT[:1]}, "no answer"),
}


@pytest.mark.parametrize(("record", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_text_is_refused(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    """By file and line."""
    file = tmp_path / "conversations"
    file.write_text(json.dumps(record))
    with pytest.raises(InputError) as refused:
        read_traffic(file, characters_per_token=4)
    assert message in str(refused.value)


def test_answers_to_images_are_left_out_and_counted(tmp_path: Path) -> None:
    """Those after the image; keys that are not read are named."""
    file = tmp_path / "conversations"
    seen = talk(("user", [IMAGE]), ("assistant", SAID), who="role", what="content")
    rated = [CHAT[0], CHAT[1] | {"score": 3}]
    file.write_text(json.dumps([{"id": "a", "messages": rated + seen + CHAT}]))
    found = read_traffic(file, TraceReading(skip_images=True), characters_per_token=4)
    assert found.requests == 1
    assert found.lines()[:3] == [
        "read as conversations: lengths alone, 4 characters a token",
        "left out: 2 answers to images, audio or video",
        "keys that are not read: id, score of a turn",
    ]
    with pytest.raises(InputError, match="this file has no times"):
        read_traffic(file, TraceReading(time_unit="s", skip_images=True), characters_per_token=4)
