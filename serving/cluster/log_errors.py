"""Why a replica did not start: the one line in its logs that says it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ERROR = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (?!Traceback)(.+)")
ECHOES = (
    "Engine core initialization failed",
    "RayTaskError",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "ActorDiedError",
)
"""Errors that only report another one."""


def why(logs: Path, message: str) -> str:
    """
    Find the root of a failure.

    Args:
        logs: directory of Ray's logs.
        message: what Ray Serve says.

    Returns:
        The first error in the workers' logs that is no echo of another; Serve's message if the
        logs name none.
    """
    for file in sorted(logs.glob("worker-*.err")) + sorted(logs.glob("worker-*.out")):
        found = _error(file.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found
    return first_error(message)


def first_error(text: str) -> str:
    """Return the first error that is no echo of another, or the end of *text* in one line."""
    return _error(text) or " ".join(text.split())[-500:]


def _error(text: str) -> str | None:
    """Return the first error that is no echo of another, if any."""
    for line in text.splitlines():
        match = ERROR.search(line)
        if match and not any(echo in line for echo in ECHOES):
            return f"{match[1]}: {match[2].strip()}"
    return None
