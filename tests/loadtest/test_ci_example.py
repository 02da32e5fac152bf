"""The CI example uses commands and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from typer.main import get_command

import loadtest.cli
import serving.cli
import sizing.cli

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ci.yml"
APPS = {"loadtest": loadtest.cli.app, "serving": serving.cli.app, "sizing": sizing.cli.app}


def commands() -> list[list[str]]:
    """Return our commands in the example's steps."""
    (job,) = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["jobs"].values()
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    words = [shlex.split(line) for line in lines]
    return [line for line in words if line and line[0] in APPS]


@pytest.mark.parametrize("line", commands(), ids=" ".join)
def test_every_command_of_the_example_exists(line: list[str]) -> None:
    """Command and options are ones that the tools have."""
    program, name, *rest = line
    group: Any = get_command(APPS[program])
    command = group.get_command(click.Context(group), name)
    known = {option for parameter in command.params for option in parameter.opts}
    used = {re.sub("=.*", "", word) for word in rest if word.startswith("-")}

    assert used <= known


def test_the_example_gates_and_cleans_up() -> None:
    """The verdict is the job's last word but for stopping what runs, which always happens."""
    (job,) = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["jobs"].values()
    steps = job["steps"]
    load = next(k for k, step in enumerate(steps) if "loadtest run" in step.get("run", ""))

    assert "continue-on-error" not in steps[load]
    assert all(step.get("if") == "always()" for step in steps[load + 1 :])
    assert any("serving down" in step.get("run", "") for step in steps[load + 1 :])
