"""Bodies that are JSON and would still break something behind the door."""

from __future__ import annotations

import json
from typing import Any

from serving.protocol.refusal import Refusal
from serving.request.validation import RequestRefused

DEEPEST = 64
"""Levels of a body: ours goes through pickle, templates and schemas, which recurse."""


def check_sound(raw: bytes, body: dict[str, Any]) -> None:
    """
    Refuse what nobody can pass on: deep nesting, and halves of surrogate pairs.

    Raises:
        Refused: 400.
    """
    if raw.count(b"[") + raw.count(b"{") > DEEPEST and _depth(body) > DEEPEST:
        message = f"The body is nested too deeply: at most {DEEPEST} levels."
        raise RequestRefused(Refusal(status=400, message=message))
    if b"\\ud" in raw or b"\\uD" in raw:
        for name, value in body.items():
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                param = name.encode("ascii", "replace").decode()
                message = f"{param}: expected text, not half of a surrogate pair."
                raise RequestRefused(Refusal(status=400, message=message, param=param)) from None


def _depth(body: dict[str, Any]) -> int:
    """Return the number of levels, without recursion."""
    depth = 0
    level: list[Any] = [body]
    while level:
        depth += 1
        inner = (
            each
            for value in level
            for each in (value.values() if isinstance(value, dict) else value)
        )
        level = [each for each in inner if isinstance(each, dict | list)]
    return depth
