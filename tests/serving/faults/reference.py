"""What a bare vLLM server answers, asked before the deployment is up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.serving.client import Answer, ask, post
from tests.serving.reference import bare_server

from .bodies import CLASSES, words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_MODEL_LEN = 2048
MAX_TOKENS = 24
BLOCK = 32
LONGEST = MAX_MODEL_LEN - MAX_TOKENS

FEW_LENGTHS = (1, 2, 8, 31, 32, 33, 63, 64, 65, 200, 384, 513, 768, 1537, LONGEST - 1, LONGEST)
"""Prompt lengths: the shortest and longest, and those around whole blocks of KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Prompts with their answers, and the answer to each of `bodies.CLASSES` by name."""

    prompts: tuple[list[int], ...]
    answers: tuple[Answer, ...]
    classes: dict[str, dict[str, Any]]


def many_lengths(count: int) -> list[int]:
    """Return *count* prompt lengths: 1 to the longest, around every multiple of a block first."""
    around = [n * BLOCK + beside for n in range(1, LONGEST // BLOCK) for beside in (-1, 0, 1)]
    more = [length for length in around if length not in FEW_LENGTHS]
    step = max(1, len(more) // (count - len(FEW_LENGTHS)))
    return sorted([*FEW_LENGTHS, *more[::step]][:count])


def ask_bare_server(model: Path, prompt_lengths: Sequence[int], log: Path) -> Reference:
    """Start one in float32, ask everything, stop it."""
    prompts = tuple(words(length, 1000 + length) for length in prompt_lengths)
    with bare_server(model, dtype="float32", log=log, cores="0") as url:
        answers = tuple(ask(url, prompt, MAX_TOKENS, "bare") for prompt in prompts)
        classes = {}
        for name, asked in CLASSES.items():
            body = {name: value for name, value in asked.body.items() if name != "best_of"}
            _, classes[name] = post(f"{url}/v1/{asked.kind}", {"model": "demo", **body})
    return Reference(prompts=prompts, answers=answers, classes=classes)
