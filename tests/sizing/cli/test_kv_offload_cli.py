"""KV offload from a scenario's keys to the plan, the simulation and other stacks' files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.sizing.conftest import QUICK, Sizing

HOST = ("--set", "engine.kv_offload_host_bytes=2e11")


def test_a_plan_carries_it_and_a_trace_shows_it(
    sizing: Sizing, plan_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The plan, its explanation, hit rates by capacity, and vLLM's connector."""
    plan, trace = str(plan_of(*QUICK, *HOST)), tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 3,
         "hash_ids": [n % 5 * 2, n % 5 * 2 + 1]}
        for n in range(60)
    ]  # fmt: skip
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = sizing("simulate", plan, "--trace", str(trace), "--by-capacity", "--json")
    assert done.code == 0
    curve = json.loads(done.out)["hit_rate_by_capacity"]
    assert curve[-1]["hit_fraction"] > 0.5
    assert "KV offload" in sizing("explain", plan).out
    text = sizing("export", plan, "--to", "vllm").out
    assert "OffloadingConnector" in text
    assert sizing("export", plan, "--to", "sglang").code == 2
    assert sizing("simulate", plan, "--by-capacity").code == 2
