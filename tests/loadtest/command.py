"""The command as users type it, and what it leaves."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from loadtest.cli import main
from minicluster.workload.samples import Sample, read_samples
from tests.waiting import until

ServerStarter = Callable[..., str]
COMMAND = [sys.executable, "-c", "from loadtest.cli import main; main()"]
"""For tests of the process itself: its signals and its end."""
PATIENT = "ttft=30,tpot=5,percentile=p50"
"""An SLO that no answer misses; whether a run proves it depends on the machine."""
SHORT = ["--output-tokens", "10", "--input-tokens", "16-64", "--warmup", "0.3", "--seed", "1"]
FAST = {"ttft_s": 0.05, "itl_s": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What the command left behind it."""

    returncode: int
    stdout: str
    stderr: str


def loadtest(*arguments: str | Path) -> Done:
    """Run `loadtest` in this process, as under a pipe; what nobody foresaw is raised."""
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with (
        patch.object(sys, "argv", ["loadtest", *map(str, arguments)]),
        patch.dict(os.environ, COLUMNS="80"),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code
    assert isinstance(code, int)
    return Done(returncode=int(code), stdout=out.getvalue(), stderr=err.getvalue())


def run(host: str, folder: Path, *more: str, rate: float = 60) -> Done:
    """Load *host* for a hundred requests and an SLO that holds if answers come."""
    extent = () if {"--duration", "--requests"} & {*more} else ("--requests", "100")
    slo = () if "--slo" in more else ("--slo", PATIENT)
    return loadtest(
        "run", "--host", host, "--rate", str(rate), *SHORT, *extent, *slo, "-o", folder, *more
    )


def answered(folder: Path) -> list[Sample]:
    """Return the samples of the window that were answered."""
    return [s for s in read_samples(folder / "samples.jsonl") if s.ok and s.in_window]


def verdict_in(folder: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    return verdict


def start_run(host: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a long run and wait until the first answers are there."""
    extent = ["--duration", "300", "--slo", PATIENT, "-o", str(folder)]
    command = [*COMMAND, "run", "--host", host, "--rate", "40", *SHORT, *extent, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    samples = folder / "samples.jsonl"
    until(lambda: samples.exists() and len(answered(folder)) > 10, "answers")
    return process
