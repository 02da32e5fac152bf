"""The replicas' logs: their ends, and the first error that explains a failed start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from serving.cluster.state import LOGS, read_state

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLICA = ":actor_name:ServeReplica:"

ERROR = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (?!Traceback)(.+)")
ECHOES = (
    "Engine core initialization failed",
    "RayTaskError",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "ActorDiedError",
)
"""Errors that only report another error."""


def access_log_name(number: int) -> str:
    """Return the name of the access log of an endpoint process."""
    return "access.log" if number == 0 else f"access-{number}.log"


def replica_logs(lines: int) -> Iterator[tuple[str, str]]:
    """
    Yield the file and the last *lines* lines of each replica's output, and of the access logs.

    Raises:
        NegativeAnswer: there is no log, of a running or a past deployment.
    """
    state = read_state()
    directory = state.logs if state is not None else LOGS
    if not directory.is_dir():
        raise NegativeAnswer("no logs: nothing was deployed from this directory")
    for file in sorted(directory.glob("worker-*.*")):
        text = file.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line for line in text[:5] if line.startswith(REPLICA)), None)
        if name is not None:
            title = f"{name.removeprefix(REPLICA)} {Path(file).suffix[1:]}: {file}"
            yield title, "\n".join(text[-lines:])
    for access in sorted((directory / "serve").glob("access*.log")):
        text = access.read_text(encoding="utf-8", errors="replace").splitlines()
        yield f"requests: {access}", "\n".join(text[-lines:])


def root_cause(logs: Path, message: str, since_s: float = 0.0) -> str:
    """
    Return the first error in the workers' logs since *since_s* that does not only report another.

    Without one it is *message*, Ray Serve's own.
    """
    for file in sorted(logs.glob("worker-*.err")) + sorted(logs.glob("worker-*.out")):
        if file.stat().st_mtime < since_s:
            continue
        error = _first_error(file.read_text(encoding="utf-8", errors="replace"))
        if error:
            return error
    return first_error(message)


def first_error(text: str) -> str:
    """Return the first original error in *text*, or the end of *text* in one line."""
    return _first_error(text) or " ".join(text.split())[-500:]


def _first_error(text: str) -> str | None:
    for line in text.splitlines():
        match = ERROR.search(line)
        if match and not any(echo in line for echo in ECHOES):
            return f"{match[1]}: {match[2].strip()}"
    return None
