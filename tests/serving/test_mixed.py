"""An aggregated plan for GPUs, on a CPU by request: one pool does both phases."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import Placement, to_json
from serving.cluster.ports import free_ports

from .client import send
from .plans import make_deployment, make_plan, make_pool

if TYPE_CHECKING:
    from pathlib import Path

    from .deployed import Shared

pytestmark = [pytest.mark.engine, pytest.mark.campaign]


def test_a_mixed_pool_made_smaller(tmp_path: Path, demo_model: Path, shared: Shared) -> None:
    """TP 8 becomes TP 2 only where asked for; it says so, is as changed, and answers correctly."""
    shared.end()
    pool = make_pool(
        "mixed", tp=8, gpu="h100-sxm", placement=(Placement(node="node-0", gpus=tuple(range(8))),)
    )
    plan = make_plan(replace(make_deployment(demo_model), pools=(pool,)))
    gpu = replace(plan.inputs.gpu, name="h100-sxm", kind="gpu", vendor="nvidia")
    (tmp_path / "plan.json").write_text(
        to_json(replace(plan, inputs=replace(plan.inputs, gpu=gpu)))
    )

    def serving(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["taskset", "-c", "0,1", sys.executable, "-m", "serving.cli", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    port = free_ports(1)[0]
    refused = serving("up", "plan.json", "--target", "cpu")
    assert refused.returncode == 3
    assert "--substitute" in refused.stderr
    up = serving("up", "plan.json", "--target", "cpu", "--substitute", "--port", str(port))
    try:
        assert up.returncode == 0, up.stderr
        assert "substituted: pools[mixed].tp: 2 instead of 8" in up.stdout
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
        status = json.loads(serving("status", "--json").stdout)
        assert "pools[mixed].tp: 2 instead of 8" in status["changes"]
    finally:
        assert serving("down").returncode == 0
