"""The `sizing` command, run in the process of the test, and plans that it writes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest

from sizing.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COLUMNS = "200"
"""Width of the terminal that tables are printed for."""

QUICK = (
    *("llama-3.1-8b-h100", "--set", "search.pools=split", "--set", "search.tp=[1]"),
    *("--set", "search.confidence_fraction=0.5"),
)
"""Arguments of a plan that takes 3 s: two prefill replicas and one for decode."""


class Done(NamedTuple):
    """How the command left."""

    code: int | str | None
    out: str
    err: str


class Sizing(Protocol):
    """The command as a function."""

    def __call__(self, *arguments: str) -> Done:
        """Run it as a user would."""


def left_with(*arguments: str) -> int | str | None:
    """Run the command; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sizing", *arguments])
        patch.setenv("COLUMNS", COLUMNS)
        with pytest.raises(SystemExit) as left:
            main()
    return left.value.code


@pytest.fixture
def sizing(capsys: pytest.CaptureFixture[str]) -> Sizing:
    """Return the command."""

    def run(*arguments: str) -> Done:
        capsys.readouterr()  # what the test itself printed
        return Done(left_with(*arguments), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from arguments of `sizing plan` to the file that it writes, once each."""

    @cache
    def written(*arguments: str) -> Path:
        path = tmp_path_factory.mktemp("plan") / "plan.json"
        assert left_with("plan", *arguments, "-o", str(path)) == 0
        return path

    return written
