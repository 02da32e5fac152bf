"""The `sizing` command."""

from __future__ import annotations

import os
from typing import NoReturn

from minicluster.command import loading

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices of 16 x 16: threads only cost


def main() -> NoReturn:
    """Run `sizing`."""
    with loading("sizing"):
        from minicluster.shell import run
        from sizing.cli.app import app
    run(app, "sizing")
