"""The `loadtest` command."""

from __future__ import annotations

from typing import NoReturn

from minicluster.command import loading


def main() -> NoReturn:
    """Run `loadtest`."""
    with loading("loadtest"):
        from loadtest.cli.app import app
        from minicluster.shell import run
    run(app, "loadtest")
