"""What the command is told: its help, and what of it is refused before anything is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.cli.app import app
from minicluster.errors import Exit
from minicluster.workload.sample_size import default_requests, enough_requests
from tests.loadtest.command import loadtest

COMMANDS = ["run", "report", "selftest", "search", "compare"]
BASE = "--rate 5 --input-tokens 10 --output-tokens 10 --slo ttft=1"
CLOSED = BASE.removeprefix("--rate 5 ")


def test_help_names_the_requests_that_are_taken() -> None:
    """What is measured by default stands in the help as it is computed."""
    for command, counted in (("run", default_requests), ("search", enough_requests)):
        told = CliRunner().invoke(app, [command, "--help"]).output
        assert all(f"{counted(name):,}" in told for name in ("p99", "p95", "p90"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_help_is_whole(command: str, width: int) -> None:
    """Nothing of it is cut, and every option says something of itself."""
    told = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [command, "-h"]).output

    assert max(map(len, told.splitlines())) == width
    assert "…" not in told
    assert "Likewise" not in told


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("", "--rate"),
        (f"{BASE} --duration 0", "--duration"),
        (f"{BASE} --duration nan", "--duration"),
        (f"{BASE} --requests 0", "--requests"),
        (f"{BASE} --requests 5 --duration 5", "--requests"),
        (f"{BASE} --warmup -1", "--warmup"),
        (f"{BASE} --seed -1", "--seed"),
        (f"{BASE} --rate -1", "requests_per_s"),
        (f"{BASE} --input-tokens many", "--input-tokens"),
        (f"{BASE} --input-tokens 9-3", "--input-tokens"),
        (f"{BASE} --slo fast", "--slo"),
        (f"{BASE} --host 127.0.0.1:8000", "--host"),
        (f"{BASE} --vocab-size 2", "--vocab-size"),
        (f"{BASE} --tolerance much", "--tolerance"),
        (f"{BASE} --require-prediction", "--require-prediction"),
        (f"{BASE} --arrivals weibull", "process"),
        (f"{BASE} --users 0", "users"),
        (f"{CLOSED} --users 3 --duration 5", "--duration"),
        (f"{CLOSED} --users 3 --warmup 5", "--warmup"),
        (f"{CLOSED} --stages 5x5 --duration 5", "--duration"),
        (f"{BASE} --users 3 --stages 5x5", "--stages"),
        (f"{BASE} --think -1", "think_s"),
        (f"{BASE} --stages fast", "--stages"),
        ("--slo ttft=1 --trace no-such-trace.csv", "no-such-trace.csv"),
        (f"{BASE} --users 3", "--rate is 5.0, but there is no such option with --users"),
        (f"{BASE} --stages 5x5", "--rate is 5.0, but there is no such option with --stages"),
        (f"{BASE} --trace t.csv", "--rate is 5.0, but there is no such option with --trace"),
        (
            f"{CLOSED} --trace t.csv",
            "--input-tokens is '10', but there is no such option with --trace",
        ),
        (
            "--output-tokens 10 --slo ttft=1 --trace t.csv",
            "--output-tokens is '10', but there is no such option with --trace",
        ),
        ("--prefix-tokens 5 --trace t.csv", "there is no such option with --trace"),
        (f"{BASE} --think 1", "--think is 1.0; it has to be --users or --turns"),
        (f"{BASE} --skip-unanswered", "--skip-unanswered"),
        (f"{BASE} --time-unit s", "--trace is missing"),
        ("--slo ttft=1 --trace t.csv --time-unit h", "--time-unit is 'h'"),
        (f"{BASE} --prefix-tokens 10", "prefix_tokens"),
        (f"{BASE} --timeout 0", "--timeout"),
        ("no-such-plan.json", "no-such-plan.json"),
        ("no-such-plan.json --rate 5", "--rate"),
        (
            "no-such-plan.json --prefix-tokens 5",
            "--prefix-tokens is 5, but there is no such option with a plan",
        ),
        (
            "no-such-plan.json --vocab-size 500",
            "--vocab-size is 500, but there is no such option with a plan",
        ),
    ],
)
def test_bad_options(arguments: str, names: str) -> None:
    """Bad input is refused in one line that names it, before anything is touched: exit 2."""
    done = loadtest("run", *arguments.split())

    assert done.returncode == Exit.BAD_INPUT
    assert names in done.stderr


def test_report_without_a_run(tmp_path: Path) -> None:
    done = loadtest("report", tmp_path)

    assert done.returncode == Exit.BAD_INPUT
    assert "run.json" in done.stderr
    assert not any(tmp_path.iterdir())
