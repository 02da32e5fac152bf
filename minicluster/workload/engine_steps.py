"""Engine steps of a load: what engines ran while requests were sent, one reader and one writer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.config import read_json
from minicluster.errors import InputError
from minicluster.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ENGINE_STEPS = "engine-steps.json"  # file of a run folder

PATH = "/engine-steps"
"""Route of the endpoint that reports them, of an interval of Unix time (`begin`, `end`)."""


class EngineStep(NamedTuple):
    """
    One step of one engine.

    Attributes:
        seconds: since the step before ended, or since it was scheduled if the engine was idle.
        prompts, prompt_tokens: requests whose prompts it computed a part of, and its tokens.
        pairs: sum over these tokens of the tokens that they attend to.
        sequences, context_tokens: requests that it decoded one token of, and their cached tokens.
        joined: requests that were in a step of this engine for the first time.
    """

    end_unix_s: float
    seconds: float
    prompts: int
    prompt_tokens: int
    pairs: int
    sequences: int
    context_tokens: int
    joined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """Steps of one engine of each role, in the order of time, and the start of the load."""

    start_unix_s: float
    of: dict[str, tuple[EngineStep, ...]]


def write_engine_steps(
    path: Path, steps: Mapping[str, Sequence[Sequence[float]]], start_unix_s: float
) -> None:
    """Write the steps of one engine of each role, whole or not at all."""
    written = {"start_unix_s": start_unix_s, "columns": EngineStep._fields, "steps": steps}
    write_atomically(path, json.dumps(written))


def read_engine_steps(path: Path) -> EngineSteps | None:
    """Read what `write_engine_steps` wrote; `None`: no such file, or no engine reported."""
    if not path.exists():
        return None
    expected = "what `loadtest run` kept of the engines' steps"
    written: Any = read_json(path, expected)
    try:
        if tuple(written["columns"]) != EngineStep._fields:
            raise InputError(f"{path}: columns", written["columns"], ", ".join(EngineStep._fields))
        steps = {
            str(role): tuple(EngineStep(*map(float, row)) for row in rows)  # type: ignore[arg-type]
            for role, rows in written["steps"].items()
        }
        start_unix_s = float(written["start_unix_s"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(str(path), "another file", expected) from None
    return EngineSteps(start_unix_s=start_unix_s, of=steps) if any(steps.values()) else None
