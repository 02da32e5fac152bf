"""Ctrl-C in `make demo-70b`: whichever command runs, nothing is left, and the code is 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.cluster.processes import cluster_processes

SCRIPT = Path(__file__).parents[1] / "scripts" / "demo_70b.py"
LIMIT_S = 300.0
LISTENS = ("env", "--default-signal=INT")
"""Starts a command that ends at Ctrl-C also where this run is a job in the background."""

HOME = Path("out/demo-70b/.minicluster/serving")


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "moment",
    [
        "$ sizing plan",
        *(
            pytest.param(text, marks=[pytest.mark.engine, pytest.mark.campaign])
            for text in ("starting engines", "probing", "$ loadtest run", "all seconds are")
        ),
    ],
)
def test_interrupted_demo_leaves_nothing(tmp_path: Path, moment: str) -> None:
    out = tmp_path / "said.txt"
    with out.open("w") as said:
        demo = subprocess.Popen(
            [*LISTENS, sys.executable, SCRIPT],
            cwd=tmp_path,
            stdout=said,
            stderr=said,
            process_group=0,
        )
    wait_until(lambda: moment in out.read_text(), demo)
    state = tmp_path / HOME / "state.json"
    cluster_id = json.loads(state.read_text())["cluster_id"] if state.exists() else "none"
    for _ in range(2):
        os.killpg(demo.pid, signal.SIGINT)
        time.sleep(0.2)

    assert demo.wait(LIMIT_S) == 130, out.read_text()
    assert "demo-70b: interrupted\n" in out.read_text()
    assert "Traceback" not in out.read_text()
    assert cluster_processes(cluster_id) == set()
    assert not state.exists()
