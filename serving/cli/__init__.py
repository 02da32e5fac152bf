"""The `serving` command."""

from __future__ import annotations

from typing import NoReturn

from serving.cli.app import app
from sizing.shell import run


def main() -> NoReturn:
    """Run `serving`."""
    run(app, "serving")
