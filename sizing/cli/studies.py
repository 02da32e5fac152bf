"""The commands that ask on, once there is a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.cli.compare import compare
from sizing.cli.long_context import long_context
from sizing.cli.losses import losses
from sizing.cli.pareto import pareto
from sizing.cli.sensitivity import sensitivity
from sizing.cli.sweep import sweep

if TYPE_CHECKING:
    import typer


def register(app: typer.Typer) -> None:
    """Add them to `sizing`."""
    for command in (compare, sweep, sensitivity, pareto, losses, long_context):
        app.command()(command)
