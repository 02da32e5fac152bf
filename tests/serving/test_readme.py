"""The README's road, command by command, on real engines; and `make demo`, whole."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from minicluster.errors import Exit
from serving.cluster.processes import cluster_processes

from .deployed import Shared, Split

pytestmark = pytest.mark.engine

LOOSE = ("slo.ttft_s=20", "slo.tpot_s=2", "slo.percentile=p90")
"""How fast this machine is does not matter here."""

LOAD_S = 25
ROOT = Path(__file__).parents[2]
MARK = "MINICLUSTER_TEST"

JUDGED = {Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE}
"""Exit codes of a load test that took place; which of them depends on the machine."""


def test_the_road_of_the_readme(split: Split, demo_model: Path, tmp_path: Path) -> None:
    """
    Each command of the README reads what the one before it wrote.

    Expected: the engines that run are timed, constants fitted to them, a plan made with these
    deploys the pools that run, a load test of it answers every request and compares it with the
    prediction, the constants are fitted to that load too, and what runs is still as planned.
    """
    split.wait_until_whole()
    # The README's scenario, of the model that is served, in what every CPU computes natively.
    settings = (f"model.id={demo_model}", "model.weight_dtype=fp32", "search.pools=split", *LOOSE)
    scenario = ("laptop", *(part for each in settings for part in ("--set", each)))
    steps, calibration = tmp_path / "steps.csv", tmp_path / "calibration.json"
    plan, out, refitted = tmp_path / "plan.json", tmp_path / "load", tmp_path / "refitted.json"

    _run(split.place, "serving", "measure", "-o", steps)
    _run(tmp_path, "sizing", "calibrate", *scenario, "--steps", steps, "-o", calibration)
    _run(tmp_path, "sizing", "plan", *scenario, "--calibration", calibration, "-o", plan)
    planned = json.loads(plan.read_text())
    assert planned["inputs"]["calibration"]["key"]["dtype"] == "fp32"
    assert {pool["role"]: (pool["replicas"], pool["tp"]) for pool in planned["pools"]} == {
        "prefill": (1, 1),
        "decode": (1, 1),
    }

    load = ("--host", split.base_url, "--duration", LOAD_S, "-o", out)
    _run(tmp_path, "loadtest", "run", plan, *load, may_end_with=JUDGED)
    verdict = json.loads((out / "verdict.json").read_text())
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert verdict["verdict"] in {"met", "missed", "inconclusive", "invalid"}
    assert len(samples) > LOAD_S
    # Those that came after the window only kept the load up, and may be unfinished.
    assert {sample["outcome"] for sample in samples if sample["in_window"]} == {"ok"}

    if verdict["verdict"] != "invalid":  # another process took the cores: nothing is learned
        _run(tmp_path, "sizing", "calibrate", "--from", out / "samples.jsonl", "-o", refitted)
        before, after = (json.loads(file.read_text()) for file in (calibration, refitted))
        assert after["num_rows"] > before["num_rows"]
        assert after["key"] == before["key"]
    found = _run(split.place, "serving", "verify", "--json")
    assert json.loads(found.stdout) == {"as_planned": True, "differences": [], "changes": []}


def _run(
    place: Path, command: str, *arguments: object, may_end_with: set[Exit] | None = None
) -> subprocess.CompletedProcess[str]:
    line = [Path(sys.executable).parent / command, *map(str, arguments)]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode in (may_end_with or {Exit.DONE}), (line, done.stdout, done.stderr)
    return done


@pytest.mark.campaign
def test_the_demo_ends_with_a_verdict(tmp_path: Path, shared: Shared) -> None:
    """It exits with 0, 3 or 4, leaves a verdict and a page, and nothing running."""
    shared.end()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    mark = secrets.token_hex(8)
    command = [sys.executable, ROOT / "scripts/demo.py"]
    environment = os.environ | {MARK: mark}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode in JUDGED, said
    verdict = json.loads((tmp_path / "out/demo/verdict.json").read_text())
    assert verdict["verdict"] in {"met", "missed", "inconclusive", "invalid"}
    assert (tmp_path / "out/demo/report.html").stat().st_size > 0
    assert not (tmp_path / ".minicluster/serving/state.json").exists()
    assert cluster_processes(mark, MARK) == set(), "processes left"
