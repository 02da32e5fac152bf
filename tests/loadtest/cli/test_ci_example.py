"""The CI examples use commands and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from typer.main import get_command

import loadtest.cli.app
import serving.cli.app
import sizing.cli.app
from minicluster.stats.shares import LEVELS, samples_needed

EXAMPLES = sorted((Path(__file__).parents[3] / "docs" / "examples").glob("*.yml"))
APPS = {
    "loadtest": loadtest.cli.app.app,
    "serving": serving.cli.app.app,
    "sizing": sizing.cli.app.app,
}


def job_of(example: Path) -> Any:  # noqa: ANN401  (YAML)
    (job,) = yaml.safe_load(example.read_text(encoding="utf-8"))["jobs"].values()
    return job


def commands(example: Path) -> list[list[str]]:
    job = job_of(example)
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    words = [shlex.split(line) for line in lines]
    return [line for line in words if line and line[0] in APPS]


@pytest.mark.parametrize(
    "line", [line for each in EXAMPLES for line in commands(each)], ids=" ".join
)
def test_every_command_of_the_example_exists(line: list[str]) -> None:
    program, name, *rest = line
    group: Any = get_command(APPS[program])
    _, command, _ = group.resolve_command(click.Context(group), [name])
    known = {option for parameter in command.params for option in parameter.opts}
    used = {re.sub("=.*", "", word) for word in rest if word.startswith("-")}

    assert used <= known


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_run_is_long_enough_for_its_promise(example: Path) -> None:
    """As many requests as prove the percentile that is planned for, in the time that is left."""
    lines = {tuple(line[:2]): line for line in commands(example)}
    plan, run = lines["sizing", "plan"], lines["loadtest", "run"]
    changed = dict(word.split("=") for word in plan if word.count("=") == 1)
    level = LEVELS[changed["slo.percentile"]]
    requests = int(run[run.index("--requests") + 1])
    job = job_of(example)

    assert requests >= samples_needed(level)
    assert requests / float(changed["workload.requests_per_s"]) < 60 * job["timeout-minutes"] / 3
