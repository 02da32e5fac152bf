"""`sizing fit`: does a model fit these GPUs, and which models do?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from typer import Argument, Exit, Option

from minicluster.errors import Exit as ExitCode
from sizing.cli.common import AsJson, Overrides, show, tracked


def fit(
    models: Annotated[
        list[str] | None,
        Argument(
            metavar="MODEL",
            help="Models: names, hub ids or config.json; absent: all of the catalog",
        ),
    ] = None,
    gpu: Annotated[str, Option(help="GPU of the catalog")] = "h100-sxm",
    gpus: Annotated[int, Option(min=1, help="Number of GPUs")] = 8,
    context: Annotated[
        int, Option(min=2, help="Tokens of a sequence, prompt and answer together")
    ] = 8192,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Tell whether a model fits so many GPUs, memory by memory; without one, which models do."""
    from sizing import catalog
    from sizing.planner.studies.fit import fit as fit_model
    from sizing.report.fit import fit_sections, models_sections

    names = models or list(catalog.models())
    keys = overrides or []
    fits = [
        fit_model(name, gpu, gpus, context_tokens=context, overrides=keys)
        for name in tracked(names, "models", total=len(names))
    ]
    one = len(fits) == 1
    parts = fit_sections(fits[0]) if one else models_sections(fits)
    data = [asdict(model) | {"best": model.best and asdict(model.best)} for model in fits]
    show(data[0] if one else data, *parts, as_json=as_json)
    if not any(model.best for model in fits):
        raise Exit(ExitCode.NEGATIVE)
