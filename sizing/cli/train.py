"""`sizing train`: step time, memory, days and energy of a training run; its best layout."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sizing import catalog
from sizing.cli.console import wide_console
from sizing.config import parse, read_toml
from sizing.errors import InputError, NegativeAnswer
from sizing.report.training import layouts_table, training_table
from sizing.training.closed_forms import rule_of_thumb
from sizing.training.estimate import estimate
from sizing.training.request import TrainingRequest
from sizing.training.search import search_layouts, settled

if TYPE_CHECKING:
    from sizing.training.estimate import TrainingEstimate
    from sizing.training.search import Trial

Count = Annotated[int | None, typer.Option()]


def train(  # noqa: PLR0913, PLR0917  (one option a key of the scenario)
    scenario: Annotated[
        Path | None,
        typer.Argument(help="TOML with the options as keys, or a shipped one; options override"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="of the catalog, or the shape below")] = None,
    layers: Count = None,
    hidden: Count = None,
    heads: Count = None,
    kv_heads: Count = None,
    head_dim: Annotated[int | None, typer.Option(help="[default: hidden / heads]")] = None,
    ffn: Annotated[int | None, typer.Option(help="width of the feed-forward")] = None,
    vocab: Count = None,
    seq: Annotated[int | None, typer.Option(help="tokens of a sequence")] = None,
    batch: Annotated[int | None, typer.Option(help="sequences of a step, all replicas")] = None,
    gpu: Annotated[str | None, typer.Option(help="of the catalog")] = None,
    cluster: Annotated[str | None, typer.Option(help="a preset, with its topology")] = None,
    gpus: Count = None,
    tp: Annotated[int | None, typer.Option(help="tensor slices")] = None,
    pp: Annotated[int | None, typer.Option(help="pipeline stages")] = None,
    cp: Annotated[int | None, typer.Option(help="slices of a sequence")] = None,
    dp: Annotated[int | None, typer.Option(help="replicas [default: what is left]")] = None,
    ep: Annotated[int | None, typer.Option(help="replicas that share out experts")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="sequences [default: chosen]")] = None,
    interleave: Annotated[
        int | None, typer.Option(help="chunks of layers a stage [default: chosen]")
    ] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp8")] = None,
    family: Annotated[
        str | None, typer.Option(help="gpt or llama [default: gpt where ffn = 4 hidden]")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="flash or materialised [default: by family]")
    ] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel")
    ] = None,
    zero: Annotated[int | None, typer.Option(help="0 to 3: what replicas shard")] = None,
    tokens: Annotated[float | None, typer.Option(help="of the whole run")] = None,
    parameters: Annotated[
        float | None, typer.Option(help="by rule of thumb: no layout, 6PT or 8PT")
    ] = None,
    flops_per_gpu_per_s: Annotated[
        float | None, typer.Option(help="that each GPU achieves, with --parameters")
    ] = None,
    gpu_mtbf_s: Annotated[float | None, typer.Option(help="[default: the cluster's]")] = None,
    checkpoint_s: Annotated[float | None, typer.Option(help="that a checkpoint takes")] = None,
    restart_s: Annotated[float | None, typer.Option(help="after a failure")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="rank every layout of the GPUs; degrees are ignored")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print exactly the data")] = False,
) -> None:
    """Estimate a training run: step, FLOP/s, memory, days, energy, failures."""
    if parameters is not None:
        numbers = (parameters, tokens, gpus, flops_per_gpu_per_s)
        _print_rule(numbers, recompute=recompute, as_json=as_json)
        return
    options = {key: value for key, value in locals().items() if key not in OWN}
    request = _request(scenario, options)
    machine = request.machine()
    ranked: list[Trial] = []
    if search:
        ranked = search_layouts(request.job, request.gpus or request.layout().gpus, machine)
        layout = ranked[0].layout
        job = request.job(layout)
    else:
        job = request.job(request.layout())
        layout = settled(
            job,
            request.layout(),
            machine,
            micro_batch=request.micro_batch,
            interleave=request.interleave,
        )
    found = estimate(
        job,
        layout,
        machine,
        tokens=request.tokens,
        interruptions=request.interruptions(machine.cluster),
    )
    _print(found, ranked, as_json=as_json)
    if not found.fits:
        raise NegativeAnswer(
            f"{found.memory_bytes / 1e9:.1f} GB a GPU do not fit the"
            f" {found.hbm_bytes / 1e9:.1f} GB of {machine.gpu.name}; way out: more tp, pp or"
            " zero, or recompute"
        )


OWN = {"scenario", "search", "as_json", "parameters", "flops_per_gpu_per_s"}
"""Arguments that are no keys of a scenario."""


def _request(scenario: Path | None, options: dict[str, Any]) -> TrainingRequest:
    """Read the scenario with the options over it."""
    shipped = catalog.files("training")
    file = scenario
    if scenario is not None and not scenario.exists() and scenario.suffix != ".toml":
        if str(scenario) not in shipped:
            raise InputError("scenario", str(scenario), "a file, or one of " + ", ".join(shipped))
        file = shipped[str(scenario)]
    raw = {} if file is None else read_toml(file)
    raw |= {key: value for key, value in options.items() if value is not None}
    return parse(TrainingRequest, raw, place="sizing train" if scenario is None else str(scenario))


def _print_rule(
    numbers: tuple[float, float | None, int | None, float | None],
    *,
    recompute: str | None,
    as_json: bool,
) -> None:
    """Print what rules of thumb say."""
    parameters, tokens, gpus, rate = numbers
    if tokens is None or gpus is None or rate is None:
        given = {"--tokens": tokens, "--gpus": gpus, "--flops-per-gpu-per-s": rate}
        missing = next(name for name, value in given.items() if value is None)
        raise InputError(missing, None, "a number beside --parameters")
    found = rule_of_thumb(
        parameters, tokens, gpus=gpus, flops_per_gpu_per_s=rate, recompute=recompute == "full"
    )
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
        return
    wide_console().print(
        f"{found.flops:.4g} FLOPs: {found.days:.1f} days on {gpus:,} GPUs,"
        f" {found.gpu_hours:,.0f} GPU-hours; {found.weight_bytes / 1e9:,.0f} GB of 32-bit weights,"
        f" about {found.memory_bytes / 1e9:,.0f} GB to train",
        highlight=False,
    )


def _print(found: TrainingEstimate, ranked: list[Trial], *, as_json: bool) -> None:
    """Print the estimate, and the ranking before it."""
    if as_json:
        data = asdict(found)
        if ranked:
            data["layouts"] = [asdict(each) for each in ranked]
        sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
        return
    console = wide_console()
    if ranked:
        console.print(layouts_table(ranked))
    console.print(training_table(found))
