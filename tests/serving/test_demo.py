"""The road of README, as `make demo` goes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from sizing.errors import Exit

if TYPE_CHECKING:
    from .deployed import Shared

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

ROOT = Path(__file__).parents[2]


def test_demo_ends_with_a_verdict(shared: Shared, tmp_path: Path) -> None:
    """It measures, plans, serves, loads and judges; its page is written, and nothing stays up."""
    shared.end()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = subprocess.run([sys.executable, ROOT / "scripts/demo.py"], cwd=tmp_path, check=False)
    verdict = json.loads((tmp_path / "out/demo/verdict.json").read_text())["verdict"]
    assert (done.returncode, verdict) in {
        (Exit.DONE, "met"),
        (Exit.DONE, "inconclusive"),
        (Exit.NEGATIVE, "missed"),
        (Exit.INCONCLUSIVE, "invalid"),
    }
    assert (tmp_path / "out/demo/report.html").exists()
    assert not (tmp_path / ".minicluster/serving/state.json").exists()
    assert [
        each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)
    ] == []
