"""A plan deployed by `serving up`, in a directory of its own, and checked from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.ports import free_ports
from sizing.child import run_child
from sizing.plan import to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sizing.plan import Plan

HERE = Path(__file__).parent

LONGEST_S = 1800
"""Two thousand answers of the ten thousand bodies, at three or four a second."""


@contextmanager
def up(place: Path, plan: Plan, **environment: str) -> Iterator[str]:
    """Have a plan deployed from *place*; yields the endpoint."""
    (place / "plan.json").write_text(to_json(plan))
    [port] = free_ports(1)
    command = [sys.executable, "-m", "serving.cli"]
    with (place / "up.txt").open("w") as said:
        deploy = [*command, "up", "plan.json", "--port", str(port)]
        env = os.environ | environment
        code = run_child(deploy, cwd=place, stdout=said, stderr=said, env=env)
        assert code == 0, (place / "up.txt").read_text()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([*command, "down"], cwd=place, check=True, capture_output=True)


def front_checks(*arguments: object) -> dict[str, Any]:
    """Run a check of `front_checks.py`, in a process of its own."""
    command = [sys.executable, HERE / "front_checks.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
