"""The subcommands, in the order of `serving --help`."""

from __future__ import annotations

import typer

from serving.cli.cluster import app as cluster
from serving.cli.deploy import demo_model, down, up
from serving.cli.inspect import logs, status, verify
from serving.cli.manifest import manifest
from serving.cli.measure import measure
from serving.cli.scale import scale

app = typer.Typer(
    help="Deployment of a plan on Ray Serve and vLLM: split prefill and decode, or mixed pools.",
    no_args_is_help=True,
    add_completion=False,
)
app.command("demo-model")(demo_model)
app.command()(up)
app.command()(status)
app.command()(verify)
app.command()(logs)
app.command()(scale)
app.command()(down)
app.command()(manifest)
app.add_typer(cluster, name="cluster")
app.command()(measure)
