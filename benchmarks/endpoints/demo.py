"""Deployments of the demo model on two cores, without a plan: nothing is promised, nothing shed."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.plan import (
    Deployment,
    EngineSettings,
    Placement,
    Pool,
    Routing,
    to_json,
)
from minicluster.specs.model import ModelSpec, architecture_hash
from serving.cluster.ports import free_nixl_port, free_ports
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget
from serving.measurement.demo_model import make_demo_model
from serving.operations.deploy import Site, deploy
from serving.operations.down import take_down

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_MODEL_LEN = 2048
KV_BYTES = 268_435_456


@contextmanager
def away() -> Iterator[Path]:
    """Be in a directory of its own, where `serving` keeps its state, with the demo model in it."""
    root = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            yield make_demo_model(Path(place) / "demo")
        finally:
            os.chdir(root)


def pool(role: str, *placements: Placement) -> Pool:
    """Return a pool with a replica of one core for each placement."""
    return Pool(
        role=role,
        replicas=len(placements),
        tp=1,
        pp=1,
        ep=1,
        gpu="cpu",
        dtype="bf16",
        max_num_seqs=4 if role == "prefill" else 16,
        max_num_batched_tokens=MAX_MODEL_LEN,
        kv_bytes=KV_BYTES,
        placement=placements,
    )


def demo(model: Path, *pools: Pool, policy: str = "power-of-two") -> Deployment:
    """Return what is to run."""
    config = json.loads((model / "config.json").read_text())
    fingerprint = architecture_hash(config)
    return Deployment(
        model=ModelSpec(
            id="demo",
            source=str(model),
            config_hash=fingerprint,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_context_tokens=config["max_position_embeddings"],
            weight_dtype="bf16",
            kv_dtype="bf16",
        ),
        engine=EngineSettings(
            name="vllm",
            version="0.29.0",
            max_model_len=MAX_MODEL_LEN,
            block_size=32,
            kv_dtype="bf16",
            gpu_memory_utilization=0.9,
        ),
        pools=pools,
        routing=Routing(policy=policy),
    )


@contextmanager
def up(deployment: Deployment) -> Iterator[str]:
    """Have it up, on this machine's cores as often as it names them; yields its address."""
    [port] = free_ports(1)
    workers = max(each.gpus for each in deployment.pools)
    served = compile_app(deployment, DeployTarget(kind="cpu", nixl_port=free_nixl_port(workers)))
    state, _ = deploy(
        served,
        Site(target="cpu", host="127.0.0.1", port=port),
        deployment=deployment,
        plan=to_json(deployment),
        report=lambda _text: None,
    )
    try:
        yield state.base_url
    finally:
        take_down(state)
