"""The `sizing` command."""

from __future__ import annotations

from typing import NoReturn

from sizing.cli.app import app
from sizing.shell import run


def main() -> NoReturn:
    """Run `sizing`."""
    run(app, "sizing")
