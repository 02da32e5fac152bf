"""The commands of `sizing`, put together."""

from __future__ import annotations

import typer

from sizing.cli import catalog

app = typer.Typer(
    help="Size an LLM inference cluster for its latency SLO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
catalog.register(app)
