"""How `make demo` ends where one of its commands fails; the whole demo is a campaign."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.contention import cpu_times

if TYPE_CHECKING:
    from types import ModuleType

FILE = Path(__file__).parents[1] / "scripts" / "demo.py"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module that writes below a folder of the test."""
    spec = importlib.util.spec_from_file_location("demo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "demo", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OUT", tmp_path)
    return module


@pytest.mark.parametrize(
    "case",
    [
        (0.61, 5, "invalid", 4),  # an engine that did not start in time
        (0.61, 3, "invalid", 4),  # no plan holds the SLO
        (0.61, 1, "invalid", 4),
        (0.05, 3, "infeasible", 3),
        (0.05, 5, "failed", 5),
        (0.05, 1, "failed", 1),
        (0.61, 2, "failed", 2),  # bad input is bad input on any machine
    ],
)
def test_a_failed_command_is_explained(
    demo: Any,  # noqa: ANN401
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[float, int, str, int],
) -> None:
    """Verdict, reasons and page lie there, and other processes are named where they explain it."""
    others, code, verdict, exit_code = case
    run = demo.Demo(screen=demo.Screen(verbose=False), mark="none", begun=cpu_times({os.getpid()}))
    monkeypatch.setattr(demo.Demo, "disturbed_fraction", lambda _self: others)
    failed = demo.StepFailed("serving up", code, ["one line", "No engine <b> started"])

    assert demo.give_up(run, failed) == exit_code

    written = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))
    assert (written["verdict"], written["exit_code"]) == (verdict, exit_code)
    busy = "other processes took 61% of the cores"
    assert (busy in written["reasons"]) == (others > 0.2)
    assert "No engine <b> started" in written["reasons"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert verdict.upper() in page
    assert "&lt;b&gt;" in page
