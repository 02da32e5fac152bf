"""Start the client process, follow it, and see that it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import MiniclusterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    t_s: float
    sent: int
    done: int
    failed: int


def drive(folder: Path, report: Callable[[Progress], None]) -> None:
    """
    Run the job in *folder* to its end; its files are then in the folder too.

    The client is a process of its own session, so that Ctrl-C reaches it once, through us.

    Raises:
        KeyboardInterrupt: passed on after the client has ended and kept what it had.
        MiniclusterError: the client crashed.

    """
    client = subprocess.Popen(
        [sys.executable, "-m", "loadtest.client.locustfile"],
        env=os.environ | {"LOADTEST_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with client:
        try:
            for line in client.stdout or ():
                report(Progress(**json.loads(line)))
            code = client.wait()
        except BaseException:
            _end(client)
            raise
    if code:
        raise MiniclusterError(f"the load client ended with exit code {code}; see above")


def _end(client: subprocess.Popen[str]) -> None:
    """Ask the client to end, then see to it."""
    client.terminate()
    try:
        client.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        client.kill()
        client.wait()
