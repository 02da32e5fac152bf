"""The commands of `sizing`."""

from __future__ import annotations

import typer

from sizing.cli import catalog, fabric, studies
from sizing.cli.calibrate import calibrate
from sizing.cli.explain import explain
from sizing.cli.place import place
from sizing.cli.plan import plan
from sizing.cli.predict import predict
from sizing.cli.simulate import simulate
from sizing.cli.spares import spares
from sizing.cli.train import train
from sizing.cli.validate import validate

app = typer.Typer(
    help="Size an LLM inference cluster for its latency SLO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, explain, predict, validate, calibrate, simulate, train, place, spares):
    app.command()(command)
catalog.register(app)
fabric.register(app)
studies.register(app)
