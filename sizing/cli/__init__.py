"""The `sizing` command."""

from __future__ import annotations

import os
from typing import NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices of 16 x 16: threads only cost

from minicluster.shell import run
from sizing.cli.app import app


def main() -> NoReturn:
    """Run `sizing`."""
    run(app, "sizing")
