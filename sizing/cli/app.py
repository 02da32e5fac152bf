"""The commands of `sizing`; the module of each is imported when the command is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

COMMANDS = {
    "plan": "plan:plan",
    "explain": "plan:explain",
    "predict": "plan:predict",
    "validate": "validate:validate",
    "calibrate": "calibrate:calibrate",
    "simulate": "simulate:simulate",
    "train": "train:train",
    "place": "place:place",
    "spares": "network:spares",
    "init": "catalog:init",
    "schema": "catalog:schema",
    "models": "catalog:models",
    "gpus": "catalog:gpus",
    "capacity": "questions:capacity",
    "day": "questions:day",
    "split-map": "questions:split_map",
    "decisions": "questions:decisions",
    "compare": "studies:compare",
    "sweep": "studies:sweep",
    "pareto": "studies:pareto",
    "losses": "simulate:losses",
    "long-context": "studies:long_context",
    "fabric": "network:app",
    "export": "stacks:export",
    "accept": "stacks:accept",
    "read": "stacks:read",
    "traffic": "stacks:traffic",
    "ui": "ui:ui",
}
"""Module and function of each command in `sizing.cli`, in the order of the help."""


class LazyGroup(TyperGroup):
    """A command group that imports only the module of the command it runs."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002  (Click's own types)
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401, ARG002  (likewise)
        """Import a command; return `None` if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(f"sizing.cli.{module}"), attribute)
        one = typer.Typer()
        if isinstance(found, typer.Typer):
            one.add_typer(found, name=cmd_name)
        else:
            one.command(name=cmd_name)(found)
        return get_group(one).commands[cmd_name]


app = typer.Typer(
    cls=LazyGroup,
    help="Size an LLM inference cluster for its latency SLO.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def sizing() -> None:
    """Size an LLM inference cluster for its latency SLO."""
