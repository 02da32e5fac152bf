"""An aggregated plan of two cores: one pool does both phases."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minicluster.plan import to_json
from serving.cluster.ports import free_ports

from .client import send
from .command import serving
from .deployed import Shared
from .plans import make_deployment, make_plan, make_pool, places

pytestmark = [pytest.mark.engine, pytest.mark.campaign]


@pytest.fixture
def two_cores() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0, 1})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("two_cores")
def test_a_mixed_pool_of_two_workers(tmp_path: Path, demo_model: Path, shared: Shared) -> None:
    """Two workers on two cores answer correctly, and as planned."""
    shared.end()
    two = places(("node-0", (0, 1)))
    pool = make_pool("mixed", tp=2, placement=two)
    (tmp_path / "plan.json").write_text(
        to_json(make_plan(replace(make_deployment(demo_model), pools=(pool,))))
    )
    port = free_ports(1)[0]
    up = serving(tmp_path, "up", "plan.json", "--port", port)
    try:
        assert up.returncode == 0, up.stderr
        url = f"http://127.0.0.1:{port}/v1/completions"
        prompt = list(range(2400, 2500))
        body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        whole, stream = send(url, body), send(url, body | {"stream": True})
        assert whole.done, whole
        assert stream.done, stream
        events = [json.loads(event) for event in stream.events if event != "[DONE]"]
        text = "".join(each["choices"][0]["text"] for each in events if each["choices"])
        assert text == whole.body["choices"][0]["text"]
        assert whole.body["usage"]["completion_tokens"] == 12
        verify = serving(tmp_path, "verify", "--json")
        assert json.loads(verify.stdout)["differences"] == []
    finally:
        assert serving(tmp_path, "down").returncode == 0
