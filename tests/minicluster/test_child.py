"""A command that we wait for ends before us, and has the time to clean up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from minicluster.command import run_child

if TYPE_CHECKING:
    from pathlib import Path

CHILD = """
import pathlib, signal, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
pathlib.Path("started").touch()
while not told:
    time.sleep(0.01)
time.sleep(1.0)
pathlib.Path("cleaned").write_text(str(len(told)))
"""
PARENT = """
import signal, sys
from minicluster.command import run_child
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs run in the background
try:
    run_child([sys.executable, "child.py"])
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_exit_code(tmp_path: Path) -> None:
    """What the command ends with comes back."""
    assert run_child([sys.executable, "-c", "raise SystemExit(3)"], cwd=tmp_path) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_told_child_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    """Whatever tells us to end, the command gets one SIGINT and all its time."""
    (tmp_path / "child.py").write_text(CHILD)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    parent.send_signal(number)
    assert parent.wait(timeout=30) == 130
    assert (tmp_path / "cleaned").read_text() == "1"


def test_an_impatient_second_interrupt_changes_nothing(tmp_path: Path) -> None:
    """A second Ctrl-C does not leave the command behind."""
    (tmp_path / "child.py").write_text(CHILD)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    parent.send_signal(signal.SIGINT)
    time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=30) == 130
    assert (tmp_path / "cleaned").read_text() == "1"
