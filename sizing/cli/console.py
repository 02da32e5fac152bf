"""Where wide tables go."""

from __future__ import annotations

from rich.console import Console

WIDTH = 160
"""Columns of a table that goes into a pipe or a file."""


def wide_console() -> Console:
    """Return stdout, wide enough where nobody's terminal limits it."""
    console = Console()
    return console if console.is_terminal else Console(width=max(WIDTH, console.width))
