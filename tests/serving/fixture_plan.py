"""Deployments to test with: the demo model on two cores."""

from __future__ import annotations

import json
from pathlib import Path

from sizing.plan import Deployment, EngineSettings, Placement, PlanModel, Pool, Routing
from sizing.specs.architecture import architecture_hash
from sizing.specs.model import ModelSpec


def pool(role: str, cores: tuple[int, ...] = (0,), **changes: object) -> Pool:
    """Return a pool on the node `laptop`, one replica of TP 1 unless changed."""
    given: dict[str, object] = {
        "role": role,
        "replicas": 1,
        "tp": 1,
        "pp": 1,
        "ep": 1,
        "gpu": "cpu-core",
        "dtype": "bf16",
        "max_batch_size": 4 if role == "prefill" else 16,
        "max_batched_tokens": 2048,
        "kv_bytes": 268435456.0,
        "placement": (Placement(node="laptop", gpus=cores),),
    }
    return Pool(**{**given, **changes})  # type: ignore[arg-type]


def demo_deployment(
    model: Path, *, dtype: str = "bf16", max_model_len: int = 2048, pools: tuple[Pool, ...] = ()
) -> Deployment:
    """Return prefill on core 0 and decode on core 1, unless *pools* says otherwise."""
    config = json.loads((model / "config.json").read_text())
    fingerprint = architecture_hash(config)
    return Deployment(
        model=PlanModel(id="demo", source=str(model), config_hash=fingerprint),
        architecture=ModelSpec(
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
            weight_dtype=dtype,
            kv_dtype=dtype,
        ),
        engine=EngineSettings(
            name="vllm",
            version="0.29.0",
            max_model_len=max_model_len,
            block_size=32,
            kv_dtype=dtype,
            memory_fraction=0.9,
        ),
        pools=pools or (pool("prefill", (0,), dtype=dtype), pool("decode", (1,), dtype=dtype)),
        routing=Routing(),
    )
