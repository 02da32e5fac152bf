"""Our own commands: found beside this Python, and waited for while they clean up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from minicluster.command import find_command, postponed, run_child
from minicluster.errors import InputError
from minicluster.shell import run

CHILD = """
import pathlib, signal, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
pathlib.Path("started").touch()
while not told:
    time.sleep(0.01)
time.sleep(0.6)
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

IMPORTED = """
import os, signal, sys
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
from {command}.cli import main
sys.meta_path.insert(0, Pressed())
sys.argv = ["{command}", "{word}"]
main()
"""


EARLY = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs run in the background
os.kill(os.getpid(), signal.SIGINT)
from sizing.cli import main
main()
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the folder of this Python, and one on the path."""
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    for folder in (beside, elsewhere):
        folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    return beside, elsewhere


def command(folder: Path) -> str:
    path = folder / "sizing"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    return str(path)


def test_the_one_beside_this_python_comes_first(folders: tuple[Path, Path]) -> None:
    beside, elsewhere = folders
    with pytest.raises(InputError, match=r"sizing is missing.*make setup"):
        find_command("sizing")
    other = command(elsewhere)
    assert find_command("sizing") == other
    assert run_child([other]) == 3
    own = command(beside)
    assert find_command("sizing") == own


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGINT)]
)
def test_a_told_child_cleans_up(tmp_path: Path, signals: tuple[signal.Signals, ...]) -> None:
    """Whatever tells us to end, and however often: the command gets one SIGINT and all its time."""
    (tmp_path / "child.py").write_text(CHILD)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    for number in signals:
        parent.send_signal(number)
        time.sleep(0.2)
    assert parent.wait(timeout=30) == 130
    assert (tmp_path / "cleaned").read_text() == "1"


@pytest.mark.parametrize(
    ("command", "word", "module"),
    [
        ("sizing", "--help", "typer"),
        ("serving", "--help", "minicluster.lazy_commands"),
        ("loadtest", "--help", "loadtest.cli.app"),
        ("sizing", "models", "numpy"),
        ("serving", "status", "serving.operations.status"),
    ],
)
def test_a_command_interrupted_while_it_is_imported_says_so_in_one_line(
    command: str, word: str, module: str
) -> None:
    line = [sys.executable, "-c", IMPORTED.format(command=command, word=word, module=module)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{command}: interrupted\n")


def test_a_command_interrupted_while_its_interpreter_starts_says_so_in_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """SIGINT stays blocked until the command has set its handler."""
    code = run_child([sys.executable, "-c", EARLY])
    assert (code, capfd.readouterr().err) == (130, "sizing: interrupted\n")


def test_a_command_that_is_interrupted_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def wait() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["try"])
    with pytest.raises(SystemExit) as ended:
        run(app, "try")
    assert (ended.value.code, capsys.readouterr().err) == (130, "try: interrupted\n")


def test_ctrl_c_waits_for_the_end_of_a_step() -> None:
    """The step ends first, and then the interrupt is raised once."""
    done = []

    def step(*interrupts: signal.Signals) -> None:
        with postponed():
            for number in interrupts:
                signal.raise_signal(number)
            done.append("step")

    with pytest.raises(KeyboardInterrupt):
        step(signal.SIGINT, signal.SIGTERM)
    step()
    assert done == ["step", "step"]
