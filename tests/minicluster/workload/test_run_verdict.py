"""The verdict that sizing reads of a load test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minicluster.errors import InputError
from minicluster.workload.run_verdict import read_run_verdict

WHOLE = {"verdict": "met", "reasons": ["every limit is kept"], "window": {"start_s": 3}, "more": 1}


def test_a_verdict_is_read(tmp_path: Path) -> None:
    """Verdict, reasons and the start of what counts; without one of them the way out is named."""
    path = tmp_path / "verdict.json"
    assert read_run_verdict(path) is None
    path.write_text(json.dumps(WHOLE))
    found = read_run_verdict(path)
    assert (found.verdict, found.reasons, found.start_s) == ("met", ("every limit is kept",), 3.0)
    for key in ("verdict", "reasons", "window"):
        path.write_text(json.dumps({name: WHOLE[name] for name in WHOLE if name != key}))
        with pytest.raises(InputError, match=r"verdict\.json.*`loadtest report`"):
            read_run_verdict(path)
