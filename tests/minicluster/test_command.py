"""Our own commands are found beside this Python."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from minicluster.command import find_command
from minicluster.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


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
    """Put a command there."""
    path = folder / "sizing"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_one_beside_this_python_comes_first(folders: tuple[Path, Path]) -> None:
    beside, elsewhere = folders
    with pytest.raises(InputError, match=r"sizing is missing.*make setup"):
        find_command("sizing")
    other = command(elsewhere)
    assert find_command("sizing") == other
    own = command(beside)
    assert find_command("sizing") == own
