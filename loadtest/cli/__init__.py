"""The `loadtest` command."""

from loadtest.cli.app import main

__all__ = ["main"]
