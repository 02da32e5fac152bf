"""What tests/conftest.py promises of every run, in one process and under pytest-xdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"

PASSES = """
import pytest

def test_passes():
    assert True

@pytest.mark.campaign
def test_campaign():
    assert True
"""
SKIPS = """
import pytest

def test_skips():
    pytest.skip("for a reason")
"""
SKIPS_WHOLE = """
import pytest

pytest.importorskip("a_module_that_is_nowhere")

def test_never():
    assert True
"""
HANGS = """
import threading
import pytest

@pytest.mark.timeout(0.2)
def test_hangs():
    threading.Event().wait()

def test_after():
    assert True
"""


def run(place: Path, workers: int, *files: str) -> subprocess.CompletedProcess[str]:
    """Run tests of these texts under our conftest.py."""
    shutil.copy(CONFTEST, place)
    (place / "pytest.ini").write_text("[pytest]\nmarkers =\n  campaign: takes minutes\n")
    for number, text in enumerate(files):
        (place / f"test_{number}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, str(place)], cwd=place, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_what_did_not_run_is_named(tmp_path: Path, workers: int) -> None:
    """
    A test or a module that skips fails a run that is green otherwise; campaigns are counted.

    A test that hangs fails alone, at its timeout and with the line at which it stood.
    """
    hangs = [] if workers else [HANGS]
    done = run(tmp_path, workers, PASSES, SKIPS, SKIPS_WHOLE, *hangs)
    assert ("1 passed, 2 skipped" if workers else "1 failed, 2 passed, 2 skipped") in done.stdout
    assert done.returncode == 1
    assert "skipped, but no test may: test_1.py::test_skips" in done.stdout
    assert "skipped, but no test may: test_2.py" in done.stdout
    assert "left out: 1 campaigns (make test-all)" in done.stdout
    assert ("threading.Event().wait()" in done.stdout) == bool(hangs)
