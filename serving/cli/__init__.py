"""The `serving` command."""

from __future__ import annotations

from typing import NoReturn

from minicluster.command import loading


def main() -> NoReturn:
    """Run `serving`."""
    with loading("serving"):
        from minicluster.shell import run  # noqa: PLC0415  (a second to import)
        from serving.cli.app import app  # noqa: PLC0415
    run(app, "serving")
