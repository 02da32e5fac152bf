"""Our predictions beside those of another tool, which a fake one stands for: no network."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.sizing.evidence.rows import CELLS, row

ROOT = Path(__file__).parents[3]
API = """
class Found:
    ttft, tpot = 200.0, 0.0

def cli_estimate(**asked):
    if asked["tp_size"] == 4:
        raise RuntimeError("no table | of 4")
    if asked["tp_size"] == 2 and asked["database_mode"] == "SILICON":
        raise ValueError("no silicon data")
    found = Found()
    found.tpot = float(asked["batch_size"])
    return found
"""
SLOTS = """
def get_version_slots(system, backend):
    return {"current": "0.24.0", "previous": "0.15.1"}
"""


@pytest.fixture(scope="module")
def scoreboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scoreboard", ROOT / "benchmarks/scoreboard.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["scoreboard"] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a tool's environment: our Python, with a fake package."""
    home = tmp_path / "aiconfigurator"
    for name, text in {"cli/api.py": API, "sdk/perf_database.py": SLOTS}.items():
        file = home / "fake" / "aiconfigurator" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    write_python(home, f'exec {sys.executable} "$@"')
    (home / "installed.txt").touch()
    monkeypatch.setenv("PYTHONPATH", str(home / "fake"))
    return tmp_path


def write_python(home: Path, body: str) -> None:
    (home / "bin").mkdir(parents=True, exist_ok=True)
    (home / "bin" / "python").write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    (home / "bin" / "python").chmod(0o755)


def test_scores_are_errors_over_the_rows_that_both_answer(scoreboard: ModuleType) -> None:
    """A tool is better by the median of the shared rows; a refusal counts as no answer."""
    answer = scoreboard.Answer
    rows = [row(id=name, ttft_s="1", tpot_s="0.1") for name in ("a", "b", "c")]
    answers = {
        "sizing": {
            "a": answer(ttft_s=1.1, tpot_s=0.09),
            "b": answer(ttft_s=0.7, tpot_s=0.1),
            "c": answer(ttft_s=5.0, tpot_s=0.1),
        },
        "other": {
            "a": answer(ttft_s=1.3, tpot_s=0.08),
            "b": answer(ttft_s=1.0, tpot_s=None),
            "c": answer(reason="no table | of c", answered=False),
        },
    }
    scores = scoreboard.compared(rows, answers, "other")
    assert [(s.row_class, s.quantity) for s in scores] == [
        (name, quantity) for name in ("all", "dense, serving") for quantity in ("ttft", "tpot")
    ]
    ttft, tpot = scores[:2]
    assert (ttft.rows, ttft.answered, ttft.shared) == (3, {"sizing": 3, "other": 2}, 2)
    assert ttft.shared_median == pytest.approx({"sizing": 0.2, "other": 0.15})
    assert ttft.shared_mean == pytest.approx({"sizing": 0.2, "other": 0.15})
    assert ttft.median == pytest.approx({"sizing": 0.3, "other": 0.15})
    assert (ttft.best, tpot.best, tpot.shared) == ("other", "sizing", 1)
    text = scoreboard.markdown(scores, answers, {"third": "ERROR: no such package"})
    assert "other is better at: TTFT of all (15.0% against 20.0%, 2 rows); TTFT of dense" in text
    assert "| no table / of c | 1 |" in text
    assert "third was not asked: ERROR: no such package." in text


def test_one_command_writes_the_table(
    scoreboard: ModuleType, envs: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The rows of a file, predicted by both; a file that is none ends with exit code 2."""
    write_python(envs / "aisimulate", "echo 'ERROR: not here' >&2; exit 1")
    rows, found = envs / "rows.csv", envs / "found.json"
    cells = CELLS | {"ttft_s": "0.3", "tpot_s": "0.02"}
    rows.write_text(",".join(cells) + "\n" + ",".join(cells.values()) + "\n", encoding="utf-8")
    command = ["scoreboard.py", str(rows), "--envs", str(envs), "--json", str(found)]
    monkeypatch.setattr(sys, "argv", command)
    assert scoreboard.main() == 0
    assert "| all | TTFT | 1 | 1, 1 | 1 |" in capsys.readouterr().out
    data = json.loads(found.read_text(encoding="utf-8"))
    assert data["answers"]["aiconfigurator"]["one"]["ttft_s"] == 0.2
    assert data["absent"] == {"aisimulate": "ERROR: not here"}
    monkeypatch.setattr(sys, "argv", ["scoreboard.py", str(envs / "none.csv")])
    assert scoreboard.main() == 2
    assert "none.csv" in capsys.readouterr().err
