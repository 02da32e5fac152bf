"""The commands that ask on, once there is a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.cli.long_context import long_context

if TYPE_CHECKING:
    import typer


def register(app: typer.Typer) -> None:
    """Add them to `sizing`."""
    for command in (long_context,):
        app.command()(command)
