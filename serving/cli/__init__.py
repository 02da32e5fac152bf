"""The `serving` command."""

from __future__ import annotations

from typing import NoReturn

from minicluster.command import loading


def main() -> NoReturn:
    """Run `serving`."""
    with loading("serving"):
        from minicluster.shell import run
        from serving.cli.app import app
    run(app, "serving")
