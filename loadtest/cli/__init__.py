"""The `loadtest` command."""

from __future__ import annotations

from typing import NoReturn

from minicluster.command import loading


def main() -> NoReturn:
    """Run `loadtest`."""
    with loading("loadtest"):
        from loadtest.cli.app import app  # noqa: PLC0415
        from minicluster.shell import run  # noqa: PLC0415  (a second to import)
    run(app, "loadtest")
