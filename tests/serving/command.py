"""The command `serving` in a directory, and a port that is taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SERVING = (sys.executable, "-m", "serving.cli")
LIMIT_S = 600


def serving(
    place: Path, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of `serving` in *place*, whatever comes of it."""
    return subprocess.run(
        [*SERVING, *map(str, arguments)],
        cwd=place,
        env=os.environ if env is None else env,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


@contextmanager
def taken_port(host: str = "127.0.0.1") -> Iterator[str]:
    """Have a port taken, so that `serving up` starts nothing."""
    with socket.create_server((host, 0)) as other:
        yield str(other.getsockname()[1])
