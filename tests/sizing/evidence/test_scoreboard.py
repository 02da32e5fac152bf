"""Our predictions beside those of another tool, which a fake one stands for: no network."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.sizing.evidence.rows import row

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def scoreboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scoreboard", ROOT / "benchmarks/scoreboard.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["scoreboard"] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


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
