"""KV offload from a scenario's keys to the plan, the simulation and other stacks' files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sizing.conftest import QUICK, Sizing

HOST = ("--set", "engine.kv_offload_host_bytes=2e11")
PREFIX = "engine.kv_offload_"


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


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"host_bytes": "-1"}, "kv_offload_host_bytes"),
        ({"disk_bytes": "1e12"}, "kv_offload_disk_bytes"),
        ({"host_bytes": "2e12", "disk_bytes": "1e12"}, "more than engine.kv_offload_host_bytes"),
        ({"host_bytes": "1e11", "disk_bytes": "1e12"}, "kv_offload_disk_bytes_per_s"),
        ({"host_bytes": "1e11", "disk_path": "/x"}, "no such key without a disk"),
    ],
)
def test_what_cannot_be_is_refused(sizing: Sizing, keys: dict[str, str], said: str) -> None:
    """By the name of the key."""
    words = [word for key, value in keys.items() for word in ("--set", f"{PREFIX}{key}={value}")]
    done = sizing("plan", "llama-3.1-8b-h100", *words)
    assert done.code == 2
    assert said in done.err


def test_a_gpu_without_a_known_link_is_refused(sizing: Sizing) -> None:
    """Its rate is not guessed."""
    done = sizing("plan", "llama-3.1-8b-h100", "--set", "cluster.gpu=mi300x", *HOST)
    assert done.code == 2
    assert "configs/host_links.toml" in done.err
