"""Engine steps as a run keeps them: written and read back; another file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minicluster.errors import InputError
from minicluster.workload.engine_steps import (
    EngineStep,
    EngineSteps,
    read_engine_steps,
    write_engine_steps,
)

STEP = EngineStep(1_795_000_000.25, 0.012, 1, 84, 3570, 3, 300, 1)


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Each role's steps come back; a file of none, or no file, means that no engine reported."""
    file = tmp_path / "engine-steps.json"
    assert read_engine_steps(file) is None
    write_engine_steps(file, {"prefill": [STEP, STEP], "decode": []}, 5.5)
    kept = read_engine_steps(file)
    assert kept == EngineSteps(start_unix_s=5.5, of={"prefill": (STEP, STEP), "decode": ()})
    write_engine_steps(file, {"decode": []}, 5.5)
    assert read_engine_steps(file) is None


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"steps": {}},
        {"columns": ["seconds"], "steps": {}},
        {"columns": EngineStep._fields, "steps": {"prefill": [[1, 2]]}},
        {"columns": EngineStep._fields, "steps": {"prefill": [["a"] * len(STEP)]}},
        {"columns": EngineStep._fields, "steps": [1]},
        {"columns": 5, "steps": {}},
        {"columns": EngineStep._fields, "steps": {}},
        {"columns": EngineStep._fields, "steps": {}, "start_unix_s": "noon"},
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: object) -> None:
    """It names the file and what was expected."""
    file = tmp_path / "engine-steps.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"engine-steps\.json"):
        read_engine_steps(file)
