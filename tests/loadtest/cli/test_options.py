"""What the command is told: its help, and what of it is refused before anything is touched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from loadtest.cli.app import app, main
from loadtest.run.run_config import default_requests
from loadtest.studies.capacity_search import enough_requests
from minicluster.errors import Exit
from minicluster.specs.slo import SloSpec
from tests.loadtest.command import loadtest, run

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import ServerStarter

COMMANDS = ["run", "report", "selftest", "search", "compare"]
BASE = ["--rate", "5", "--input-tokens", "10", "--output-tokens", "10", "--slo", "ttft=1"]


def test_help_names_the_requests_that_are_taken() -> None:
    """What is measured by default stands in the help as it is computed."""
    for command, counted in (
        ("run", lambda name: default_requests(SloSpec(percentile=name))),
        ("search", enough_requests),
    ):
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
        ([], "--rate"),
        ([*BASE, "--duration", "0"], "--duration"),
        ([*BASE, "--duration", "nan"], "--duration"),
        ([*BASE, "--requests", "0"], "--requests"),
        ([*BASE, "--requests", "5", "--duration", "5"], "--requests"),
        ([*BASE, "--warmup", "-1"], "--warmup"),
        ([*BASE, "--seed", "-1"], "--seed"),
        ([*BASE, "--rate", "-1"], "requests_per_s"),
        ([*BASE, "--rate", "x"], "--rate"),
        ([*BASE, "--input-tokens", "many"], "--input-tokens"),
        ([*BASE, "--input-tokens", "0"], "--input-tokens"),
        ([*BASE, "--input-tokens", "9-3"], "--input-tokens"),
        ([*BASE, "--slo", "fast"], "--slo"),
        ([*BASE, "--host", "127.0.0.1:8000"], "--host"),
        ([*BASE, "--vocab-size", "2"], "--vocab-size"),
        ([*BASE, "--tolerance", "much"], "--tolerance"),
        ([*BASE, "--require-prediction"], "--require-prediction"),
        ([*BASE, "--arrivals", "weibull"], "process"),
        ([*BASE, "--arrivals", "gamma"], "gap_cv"),
        ([*BASE, "--gap-cv", "2"], "gap_cv"),
        ([*BASE, "--users", "0"], "users"),
        ([*BASE[2:], "--users", "3", "--duration", "5"], "--duration"),
        ([*BASE, "--users", "3", "--stages", "5x5"], "--stages"),
        ([*BASE, "--turns", "0"], "turns"),
        ([*BASE, "--think", "-1"], "think_s"),
        ([*BASE, "--stages", "fast"], "--stages"),
        (["--slo", "ttft=1", "--trace", "no-such-trace.csv"], "no-such-trace.csv"),
        ([*BASE, "--users", "3"], "--rate is 5.0; expected no such option with --users"),
        ([*BASE, "--stages", "5x5"], "--rate is 5.0; expected no such option with --stages"),
        ([*BASE, "--trace", "t.csv"], "--rate is 5.0; expected no such option with --trace"),
        (
            [*BASE[2:], "--trace", "t.csv"],
            "--input-tokens is '10'; expected no such option with --trace",
        ),
        (
            [*BASE[4:], "--trace", "t.csv"],
            "--output-tokens is '10'; expected no such option with --trace",
        ),
        (["--prefix-tokens", "5", "--trace", "t.csv"], "expected no such option with --trace"),
        ([*BASE, "--think", "1"], "--think is 1.0; expected --users or --turns"),
        ([*BASE, "--skip-unanswered"], "--skip-unanswered"),
        ([*BASE, "--prefix-tokens", "10"], "prefix_tokens"),
        ([*BASE, "--timeout", "0"], "--timeout"),
        (["no-such-plan.json"], "no-such-plan.json"),
        (["no-such-plan.json", "--rate", "5"], "--rate"),
        (
            ["no-such-plan.json", "--prefix-tokens", "5"],
            "--prefix-tokens is 5; expected no such option with a plan",
        ),
        (
            ["no-such-plan.json", "--vocab-size", "500"],
            "--vocab-size is 500; expected no such option with a plan",
        ),
    ],
)
def test_bad_options(
    arguments: list[str],
    names: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bad input is refused in one line that names it, before anything is touched: exit 2."""
    monkeypatch.setattr(sys, "argv", ["loadtest", "run", *arguments])
    with pytest.raises(SystemExit) as left:
        main()

    assert left.value.code == Exit.BAD_INPUT
    assert names in capsys.readouterr().err


def test_rate_beyond_the_client(start_server: ServerStarter, tmp_path: Path) -> None:
    """A rate that no client could send is refused before it is tried."""
    done = run(start_server(), tmp_path / "out", "--duration", "60", rate=1e6)

    assert done.returncode == Exit.BAD_INPUT
    assert "lower rate" in done.stderr


def test_report_without_a_run(tmp_path: Path) -> None:
    """A folder that holds no run is refused by name."""
    done = loadtest("report", tmp_path)

    assert done.returncode == Exit.BAD_INPUT
    assert "run.json" in done.stderr
    assert not any(tmp_path.iterdir())
