"""`sizing long-context`: one long prompt in an empty system."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from minicluster.errors import InputError
from minicluster.specs.slicing import Slicing
from sizing.cli.inputs import naming, read_inputs
from sizing.cli.plan import OVERRIDES  # noqa: TC001  (Typer reads the annotations)
from sizing.planner.studies.long_context import long_prompt
from sizing.planner.studies.rule import find_rule
from sizing.report.long_context import (
    answers_table,
    long_context_lines,
    long_context_table,
    token_table,
)

SLICING = re.compile(r"TP([1-9]\d{0,5})(?:xPP([1-9]\d{0,5}))?", re.IGNORECASE)
LENGTHS = "32768,65536,100000,131072"
LAYOUTS = "TP8,TP16,TP4xPP3,TP8xPP2,TP8xPP4,TP8xPP8"
SCENARIO = Path("llama-2-70b-long")


def long_context(
    scenario: Annotated[
        Path, typer.Argument(help="TOML, or a shipped scenario; its rate and lengths do not count")
    ] = SCENARIO,
    tokens: Annotated[str, typer.Option(help="prompt lengths, by commas")] = LENGTHS,
    slicing: Annotated[str, typer.Option(help="layouts to time, by commas")] = LAYOUTS,
    preset: Annotated[str, typer.Option(help="rule of thumb to compare with")] = "talk",
    as_json: Annotated[bool, typer.Option("--json", help="print every term")] = False,
    overrides: OVERRIDES = None,
) -> None:
    """GPUs that hold the TTFT of one long prompt: by compute alone, and by the whole model."""
    inputs = read_inputs(scenario, overrides or [], None)
    rule = find_rule(preset)
    slicings = [parse_slicing(each) for each in slicing.split(",")]
    lengths = [_length(each) for each in tokens.split(",")]
    with naming(scenario):
        found = [long_prompt(inputs, each, slicings, rule) for each in lengths]
    if as_json:
        document = {
            "model": inputs.model.id,
            "gpu": inputs.gpu.name,
            "slo_ttft_s": inputs.scenario.slo.ttft_s,
            "assumed_context_tokens": inputs.scenario.model.assumed_context_tokens,
            "preset": asdict(rule),
            "prompts": [asdict(each) for each in found],
        }
        sys.stdout.write(json.dumps(document, indent=2, sort_keys=True) + "\n")
        return
    console = Console()
    console.print(f"{inputs.model.id}, {inputs.model.weight_dtype}, on {inputs.gpu.name}")
    console.print(long_context_table(found, inputs.scenario.slo.ttft_s))
    console.print(token_table(found[0]))
    console.print(answers_table(found, rule, inputs.cluster.max_gpus))
    for line in long_context_lines(inputs, found, rule):
        console.print(line, highlight=False)


def parse_slicing(text: str) -> Slicing:
    """Read a layout: TP8, TP8xPP2."""
    match = SLICING.fullmatch(text.strip())
    if match is None:
        raise InputError("--slicing", text, "a layout, for example TP8 or TP8xPP2")
    return Slicing(tp=int(match[1]), pp=int(match[2] or 1))


def _length(text: str) -> int:
    """Read a number of tokens."""
    if not text.strip().isdecimal():
        raise InputError("--tokens", text, "whole numbers, for example 32768,65536")
    return int(text)
