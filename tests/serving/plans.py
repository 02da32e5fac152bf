"""The one factory of pools, deployments and plans that tests of serving use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from minicluster.plan import (
    Deployment,
    EngineSettings,
    Placement,
    Plan,
    Pool,
    Routing,
    to_json,
)
from minicluster.specs.model import ModelSpec, MoeSpec, architecture_hash
from minicluster.specs.scenario import EngineChoice
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from serving.cluster.state import DEPLOYMENT, PLAN, State, write_state
from sizing import catalog
from tests.plans import plan_of, prediction_of

LOAD = WorkloadSpec(
    requests_per_s=1.0, input_tokens=Lengths.fixed(100), output_tokens=Lengths.fixed(10)
)
PROFILE = catalog.find_engine(EngineChoice())


def places(*placed: tuple[str, tuple[int, ...]]) -> tuple[Placement, ...]:
    """Return a placement: devices of nodes, in their order."""
    return tuple(Placement(node=node, gpus=gpus) for node, gpus in placed)


def make_pool(role: str, cores: tuple[int, ...] = (0,), **changes: object) -> Pool:
    """Make a pool of one TP 1 replica on core 0 of a node, unless told otherwise."""
    given: dict[str, object] = {
        "role": role,
        "replicas": 1,
        "tp": 1,
        "pp": 1,
        "ep": 1,
        "gpu": "cpu",
        "dtype": "bf16",
        "max_num_seqs": 4 if role == "prefill" else 16,
        "max_num_batched_tokens": 2048,
        "kv_bytes": 268435456.0,
        "placement": places(("laptop", cores)),
    }
    return Pool(**{**given, **changes})  # type: ignore[arg-type]


def make_deployment(
    model: Path,
    *,
    dtype: str = "bf16",
    prefill: Pool | None = None,
    decode: Pool | None = None,
    max_model_len: int = 2048,
) -> Deployment:
    """Make a deployment of a model: prefill on core 0, decode on core 1, unless told otherwise."""
    config = json.loads((model / "config.json").read_text())
    return Deployment(
        model=ModelSpec(
            id="demo",
            source=str(model),
            config_hash=architecture_hash(config),
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_context_tokens=config["max_position_embeddings"],
            moe=MoeSpec(
                num_experts=config["num_local_experts"],
                experts_per_token=config["num_experts_per_tok"],
                expert_ffn_size=config["intermediate_size"],
            )
            if "num_local_experts" in config
            else None,
            weight_dtype=dtype,
            kv_dtype=dtype,
        ),
        engine=EngineSettings(
            name="vllm",
            version="0.29.0",
            max_model_len=max_model_len,
            block_size=32,
            kv_dtype=dtype,
            gpu_memory_utilization=0.9,
        ),
        pools=(
            prefill or make_pool("prefill", (0,), dtype=dtype),
            decode or make_pool("decode", (1,), dtype=dtype),
        ),
        routing=Routing(),
    )


def make_plan(deployment: Deployment) -> Plan:
    """Make the plan around a deployment; its predictions are of no interest here."""
    engine = deployment.engine
    return plan_of(
        deployment,
        profile=replace(
            PROFILE, gpu_memory_utilization=engine.gpu_memory_utilization, lora=engine.lora
        ),
        workload=LOAD,
        # Loose: what is tested is not how fast this machine is.
        slo=SloSpec(ttft_s=30.0, tpot_s=2.0),
        prediction=prediction_of(0.1, 0.1, rate=1.0, num_output=10),
    )


def make_state(**changes: object) -> State:
    """Make the state of a deployment on a cluster whose processes are gone."""
    given: dict[str, object] = {
        "cluster_id": "feedfacefeedface",
        "address": "127.0.0.2:1",
        "base_url": "http://127.0.0.1:1",
        "target": "cpu",
        "plan_hash": "0" * 16,
        "session": "",
        "started": "2026-11-20T00:00:00+00:00",
    }
    return State(**{**given, **changes})  # type: ignore[arg-type]


def deployed(plan: Plan, **changes: object) -> State:
    """Record that a plan runs from the current directory; return the state."""
    state = make_state(**changes)
    write_state(state)
    PLAN.write_text(to_json(plan))
    DEPLOYMENT.write_text(to_json(plan.deployment))
    return state


def facts_of(deployment: Deployment, pool: Pool) -> dict[str, object]:
    """Return what the engine of a replica says of itself that runs as planned."""
    return {
        "tp": pool.tp,
        "pp": pool.pp,
        "dp": pool.dp,
        "ep": pool.ep,
        "max_num_seqs": pool.max_num_seqs,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        "chunked_prefill_tokens": deployment.engine.chunked_prefill_tokens,
        "watermark_fraction": deployment.engine.watermark_fraction,
        "gpu_memory_utilization": deployment.engine.gpu_memory_utilization,
        "max_model_len": deployment.engine.max_model_len,
        "block_size": deployment.engine.block_size,
        "kv_bytes": int(pool.kv_bytes),
        "dtype": "bfloat16",
        "kv_dtype": "auto",
        "model": deployment.model.source,
        "speculative_tokens": deployment.engine.speculative_tokens,
        "redundant_experts": None,
        "all_to_all_backend": "allgather_reducescatter",
        "two_batch_overlap": False,
        "lora": None,
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[pool.role],
        "kv_connector": "NixlConnector",
    }
