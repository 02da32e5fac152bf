"""The command as users type it, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from loadtest.samples import Sample, read_samples

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-c", "from loadtest.cli import main; main()"]
PATIENT = "ttft=30,tpot=5,percentile=p50"
"""An SLO that a busy test machine does not miss."""
SHORT = ["--output-tokens", "10", "--input-tokens", "16-64", "--warmup", "0.3", "--seed", "1"]
FAST = {"ttft_s": 0.05, "itl_s": 0.01}


def loadtest(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `loadtest` and wait for it."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def run(host: str, folder: Path, *more: str, rate: float = 60) -> subprocess.CompletedProcess[str]:
    """Load *host* for a hundred requests and an SLO that holds if answers come."""
    extent = () if "--duration" in more else ("--requests", "100")
    slo = () if "--slo" in more else ("--slo", PATIENT)
    return loadtest(
        "run", "--host", host, "--rate", str(rate), *SHORT, *extent, *slo, "-o", folder, *more
    )


def answered(folder: Path) -> list[Sample]:
    """Return the samples of the window that were answered."""
    return [s for s in read_samples(folder / "samples.jsonl") if s.ok and s.in_window]


def verdict_in(folder: Path) -> dict[str, Any]:
    """Read the verdict that a run left."""
    verdict: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    return verdict
