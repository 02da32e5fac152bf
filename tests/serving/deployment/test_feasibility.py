from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minicluster.engine_model.kv_cache import kv_pages
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Deployment
from minicluster.specs.slicing import Slicing
from serving.deployment.feasibility import findings
from serving.deployment.target import Target
from tests.serving.plans import make_pool, places

LABELS = tuple({ROLE_LABEL: role, NODE_LABEL: "laptop"} for role in ("prefill", "decode"))
TWO_RANKS = {"dp": 2, "ep": 2, "placement": places(("laptop", (0, 1)))}
THREE = {"tp": 3, "placement": places(("n", (1, 2, 3)))}


@pytest.mark.parametrize(
    ("what", "change", "says"),
    [
        ("target", {}, None),
        # An existing cluster with labelled nodes is taken, whatever this machine has.
        ("target", {"labels": LABELS, "cores": frozenset(), "memory_bytes": 0}, None),
        ("target", {"system": "Darwin arm64"}, "platform: this is Darwin arm64"),
        ("target", {"ray": None}, "ray: not installed"),
        ("target", {"vllm": "0.33.0"}, "the plan wants vllm 0.29.0, here is 0.33.0"),
        ("target", {"cores": frozenset({0})}, "placement: cores [1]; this machine has [0]"),
        ("target", {"kind": "gpu", "num_gpus": 2, "cores": (), "memory_bytes": 0}, None),
        ("target", {"kind": "gpu", "num_gpus": 1}, "placement: GPUs [1]; this machine has 1"),
        ("target", {"memory_bytes": 10**9}, "memory: about"),
        ("target", {"labels": LABELS[1:]}, "cluster is labelled minicluster-role=prefill"),
        ("engine", {"name": "sglang"}, "engine.name: 'sglang'; serving deploys vllm"),
        ("engine", {"chunked_prefill_tokens": 2049}, "chunked_prefill_tokens: 2049; at most 2048"),
        ("engine", {"chunked_prefill_tokens": 2048}, None),
        ("decode", {"pp": 2, "placement": places(("n", (1, 2)))}, "pp 1 only"),
        (
            "decode",
            THREE,
            "tp: 3; expected TP 2 or 4: the number of attention heads (8) is not divisible by TP 3",
        ),
        ("decode", TWO_RANKS, "dp 2, ep 2; expected dp 1 and ep 1: the model has no experts"),
        ("decode", {"dtype": "int4"}, "dtype: int4; on a cpu one of"),
        ("decode", {"dtype": "fp32"}, "a KV cache has one dtype"),
        ("decode", {"max_num_batched_tokens": 15}, "at least max_num_seqs = 16"),
        ("decode", {"max_num_batched_tokens": 16}, None),
        ("decode", {"kv_bytes": 1e5}, "one sequence of 2048 tokens"),
        ("decode", {"placement": places(("my node", (1,)))}, "is no node label"),
        ("decode", {"placement": places(("n", (0,)))}, "all nodes are this machine"),
        ("decode", {"role": "mixed"}, "one prefill and one decode pool, or a mixed one"),
    ],
)
def test_each_reason_is_named(
    deployment: Deployment, target: Target, what: str, change: dict[str, Any], says: str | None
) -> None:
    """What a machine lacks, or an engine or a pool cannot do, is named with its value."""
    prefill, decode = deployment.pools
    if what == "target":
        target = replace(target, **change)
    elif what == "engine":
        deployment = replace(deployment, engine=replace(deployment.engine, **change))
    else:
        deployment = replace(deployment, pools=(prefill, replace(decode, **change)))
    found = findings(deployment, target)
    assert any(says in finding for finding in found) if says else not found, found
    assert what == "decode" or len(found) == (says is not None)


def test_a_mixed_pool_alone_can_be(deployment: Deployment, target: Target) -> None:
    assert findings(replace(deployment, pools=(make_pool("mixed"),)), target) == ()


def test_a_window_of_attention_needs_less_cache(deployment: Deployment, target: Target) -> None:
    """What the planner says that a sequence needs is enough, layers with a window included."""
    model = replace(deployment.model, num_window_layers=1, window_tokens=64)
    pages = kv_pages(model, slicing=Slicing(), block_size=32)
    needed = pages.block_bytes * (pages.blocks(deployment.engine.max_model_len) + 1)
    pools = tuple(replace(pool, kv_bytes=needed) for pool in deployment.pools)
    found = findings(replace(deployment, pools=pools), target)
    assert any("one sequence" in each for each in found)
    assert findings(replace(deployment, model=model, pools=pools), target) == ()


def test_model_that_changed_since_the_plan(
    tmp_path: Path, small_model: Path, deployment: Deployment, target: Target
) -> None:
    """Another architecture, no weights or no model at all are told apart."""

    def found_at(place: Path) -> str:
        model = replace(deployment.model, source=str(place))
        return " | ".join(findings(replace(deployment, model=model), target))

    config = json.loads((small_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 99}))
    assert "the plan was made for" in found_at(tmp_path)
    assert "holds no weights" in found_at(tmp_path)
    assert "No such file" in found_at(tmp_path / "gone")
