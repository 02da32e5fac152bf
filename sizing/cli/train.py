"""`sizing train`: step time, memory, days and energy of a training run, and its best layout."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from minicluster.errors import InputError, NegativeAnswer
from sizing.cli.common import AsJson, show, with_keys
from sizing.training.options import TrainingOptions

if TYPE_CHECKING:
    from sizing.training.request import TrainingRequest
    from sizing.training.search import Trial


@with_keys(TrainingOptions)
def train(
    scenario: Annotated[
        Path | None,
        Argument(help="Training scenario (TOML with the options as keys), or a shipped one"),
    ] = None,
    parameters: Annotated[
        float | None,
        Option(help="Parameter count, for a rule of thumb (6PT or 8PT FLOPs) without a layout"),
    ] = None,
    flops_per_gpu_per_s: Annotated[
        float | None, Option(help="FLOP/s that each GPU achieves, with --parameters")
    ] = None,
    search: Annotated[
        bool,
        Option("--search", help="Search over every layout of the GPUs; given degrees are ignored"),
    ] = False,
    as_json: AsJson = False,
    **keys: Any,  # noqa: ANN401  (one option a key of the scenario)
) -> None:
    """Estimate a training run: step, FLOP/s, memory, days, energy, failures."""
    from sizing.report.training import layouts_table, training_table
    from sizing.training.estimate import estimate
    from sizing.training.search import search_layouts

    if parameters is not None:
        _print_rule(parameters, flops_per_gpu_per_s, keys, as_json=as_json)
        return
    request = _request(scenario, keys)
    machine = request.machine()
    ranked: list[Trial] = []
    if search:
        ranked = search_layouts(request.job, request.gpus or request.layout().gpus, machine)
        job, layout = request.job(ranked[0].layout), ranked[0].layout
    else:
        job, layout = request.settled(machine)
    interruptions = request.interruptions(machine.cluster)
    found = estimate(job, layout, machine, tokens=request.tokens, interruptions=interruptions)
    data, tables = asdict(found), [training_table(found)]
    if ranked:
        data["layouts"] = [asdict(each) for each in ranked]
        tables.insert(0, layouts_table(ranked))
    show(data, *tables, as_json=as_json)
    if not found.fits:
        raise NegativeAnswer(
            f"{found.memory_bytes / 1e9:.1f} GB a GPU do not fit the"
            f" {found.hbm_bytes / 1e9:.1f} GB of {machine.gpu.name}; use more tp, pp or zero, or"
            " recompute",
            answered=as_json,
        )


def _request(scenario: Path | None, options: dict[str, Any]) -> TrainingRequest:
    from minicluster.config import parse, read_toml
    from sizing.catalog.folder import find_file
    from sizing.training.request import TrainingRequest

    raw: dict[str, Any] = {}
    if scenario is not None:
        expectation = "a TOML file or a shipped training scenario"
        raw = read_toml(
            find_file("training", str(scenario), place="scenario", expectation=expectation)
        )
    raw |= {key: value for key, value in options.items() if value is not None}
    return parse(TrainingRequest, raw, place="sizing train" if scenario is None else str(scenario))


def _print_rule(
    parameters: float, rate: float | None, keys: dict[str, Any], *, as_json: bool
) -> None:
    from sizing.training.estimate import rule_of_thumb

    tokens, gpus = keys["tokens"], keys["gpus"]
    if tokens is None or gpus is None or rate is None:
        given = {"--tokens": tokens, "--gpus": gpus, "--flops-per-gpu-per-s": rate}
        missing = next(name for name, value in given.items() if value is None)
        raise InputError(missing, None, "a number beside --parameters")
    recompute = keys["recompute"] == "full"
    found = rule_of_thumb(
        parameters, tokens, gpus=gpus, flops_per_gpu_per_s=rate, recompute=recompute
    )
    said = (
        f"{found.flops:.4g} FLOPs: {found.days:.1f} days on {gpus:,} GPUs,"
        f" {found.gpu_hours:,.0f} GPU-hours; {found.weight_bytes / 1e9:,.0f} GB of 32-bit weights,"
        f" about {found.memory_bytes / 1e9:,.0f} GB to train"
    )
    show(asdict(found), said, as_json=as_json)
