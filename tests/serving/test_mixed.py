"""An aggregated plan: one pool does both phases."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from serving.ports import free_ports
from sizing.plan import to_json

from .client import send

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import DeploymentMaker, PlanMaker, PoolMaker

pytestmark = pytest.mark.engine


def test_a_mixed_pool_answers(
    tmp_path: Path,
    demo_model: Path,
    make_deployment: DeploymentMaker,
    make_pool: PoolMaker,
    make_plan: PlanMaker,
) -> None:
    """Deployed as planned, streams and whole answers alike, the same greedy text each time."""
    deployment = replace(make_deployment(demo_model), pools=(make_pool("mixed", (0,)),))
    (tmp_path / "plan.json").write_text(to_json(make_plan(deployment)))

    def serving(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "serving.cli", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    port = free_ports(1)[0]
    up = serving("up", "plan.json", "--port", str(port))
    try:
        assert up.returncode == 0, up.stderr
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "demo", "prompt": list(range(2400, 2500)), "max_tokens": 12}
        whole = send(url, body | {"temperature": 0})
        stream = send(url, body | {"temperature": 0, "stream": True})
        assert whole.done, whole
        assert stream.done, stream
        events = [json.loads(event) for event in stream.events if event != "[DONE]"]
        text = "".join(each["choices"][0]["text"] for each in events if each["choices"])
        assert text == whole.body["choices"][0]["text"]
        assert whole.body["usage"]["completion_tokens"] == 12
        verify = serving("verify", "--json")
        assert json.loads(verify.stdout)["differences"] == []
        assert verify.returncode == 0
    finally:
        assert serving("down").returncode == 0
