"""The verdict that sizing reads of a load test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minicluster.errors import InputError
from minicluster.workload.run_verdict import read_run_verdict

WHOLE = {"verdict": "met", "reasons": ["every limit is kept"], "window": {"start_s": 3}, "more": 1}


def test_a_verdict_is_read(tmp_path: Path) -> None:
    """Verdict, reasons and the start of what counts; the rest is not looked at."""
    path = tmp_path / "verdict.json"
    assert read_run_verdict(path) is None
    path.write_text(json.dumps(WHOLE))
    found = read_run_verdict(path)
    assert (found.verdict, found.reasons, found.start_s) == ("met", ("every limit is kept",), 3.0)


@pytest.mark.parametrize("key", ["verdict", "reasons", "window"])
def test_a_part_that_is_missing_is_refused(tmp_path: Path, key: str) -> None:
    """The message says how the file is written anew."""
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps({name: value for name, value in WHOLE.items() if name != key}))
    with pytest.raises(InputError, match=r"verdict\.json.*`loadtest report`"):
        read_run_verdict(path)
