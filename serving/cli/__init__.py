"""The `serving` command."""

from __future__ import annotations

from typing import NoReturn

from minicluster.shell import run
from serving.cli.app import app


def main() -> NoReturn:
    """Run `serving`."""
    run(app, "serving")
