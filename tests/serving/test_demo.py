"""`make demo`, whole: `scripts/demo.py` from a directory of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minicluster.errors import Exit
from serving.cluster.processes import cluster_processes

if TYPE_CHECKING:
    from .deployed import Shared

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

ROOT = Path(__file__).parents[2]
MARK = "MINICLUSTER_TEST"


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
    assert done.returncode in {Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE}, said
    verdict = json.loads((tmp_path / "out/demo/verdict.json").read_text())
    assert verdict["verdict"] in {"met", "missed", "inconclusive", "invalid"}
    assert (tmp_path / "out/demo/report.html").stat().st_size > 0
    assert not (tmp_path / ".minicluster/serving/state.json").exists()
    assert cluster_processes(mark, MARK) == set(), "processes left"
