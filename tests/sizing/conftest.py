"""The `sizing` command, run in the process of the test, and plans that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from sizing.catalog import find_model
from sizing.cli import main
from tests.sizing.scenarios import LLAMA

COLUMNS = "200"
"""Width of the terminal that tables are printed for."""

QUICK = (
    *("llama-3.1-8b-h100", "--set", "search.pools=split", "--set", "search.tp=[1]"),
    *("--set", "search.confidence_fraction=0.5"),
)
"""Arguments of a plan that takes 3 s: two prefill replicas and one for decode."""


SMALL_MODEL = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 32000,
}  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "golden"


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


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return arguments: the demo's scenario for a small model, a made-up calibration of it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA | SMALL_MODEL))
    text = (GOLDEN / "laptop.calibration.json").read_text(encoding="utf-8")
    calibration = folder / "calibration.json"
    calibration.write_text(text.replace("HASH", find_model(str(folder)).config_hash))
    return ("laptop", "--set", f"model.id={folder}", "--calibration", str(calibration))
