"""Compiled modules of the simulation: the same numbers, and never those of an older source."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import minicluster
from minicluster import compiled

SIMULATED = """
import json, sys
sys.prefix = sys.argv[1] or sys.prefix
import sizing
from minicluster.engine_model import scheduler
from minicluster.plan.document import to_json
plan = to_json(sizing.plan(sizing.Scenario.load("llama-3.1-8b-h100")))
print(json.dumps([scheduler.__file__, plan]))
"""
"""Plans in a Python whose environment is elsewhere, so that it holds no compiled modules."""


def planned(prefix: Path | str) -> list[str]:
    """Return the file of a simulation's module, and a plan."""
    command = [sys.executable, "-c", SIMULATED, str(prefix)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found: list[str] = json.loads(ran.stdout)
    return found


def test_plan_is_the_same_compiled_and_interpreted(tmp_path: Path) -> None:
    if not minicluster.COMPILED:
        pytest.fail("make setup compiles the simulation, and did not")
    fast, plan = planned("")
    slow, same = planned(tmp_path)
    assert fast.endswith(EXTENSION_SUFFIXES[0])
    assert slow.endswith("scheduler.py")
    assert json.loads(plan) == json.loads(same)


def test_edited_source_is_not_hidden_by_what_was_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in compiled.SOURCES:
        copy = tmp_path / source
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((compiled.ROOT / source).read_bytes())
    before = compiled.folder()
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    assert compiled.folder() == before, "the same sources elsewhere"
    with (tmp_path / "minicluster/routing.py").open("a") as edited:
        edited.write("# edited\n")
    assert compiled.folder() != before


def test_only_modules_in_the_folder_are_found_there(tmp_path: Path) -> None:
    module = tmp_path / "minicluster" / f"routing{EXTENSION_SUFFIXES[0]}"
    module.parent.mkdir()
    module.touch()
    finder = compiled.CompiledFinder(tmp_path)
    found = finder.find_spec("minicluster.routing")
    assert found is not None
    assert found.origin == str(module)
    assert finder.find_spec("minicluster.errors") is None
    assert compiled.CompiledFinder(tmp_path / "absent").modules == set()
