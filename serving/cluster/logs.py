"""The replicas' logs, wherever they are now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from serving.cluster.state import LOGS, read_state

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLICA = ":actor_name:ServeReplica:"


def replica_logs(lines: int) -> Iterator[tuple[str, str]]:
    """
    Yield file and last *lines* lines of each replica's output.

    Raises:
        NegativeAnswer: there is no log, of anything running or past.
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
