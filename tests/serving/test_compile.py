from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from serving.compile import CORES, NODE_LABEL, ROLE_LABEL, compile_app, replica_devices
from sizing.plan import Placement

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import DeploymentMaker, PoolMaker


def test_prefill_golden(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """The prefill pool of the demo compiles to exactly this configuration."""
    app = compile_app(make_deployment(small_model), "cpu")
    assert app.prefill.name == "Prefill:demo"
    assert dict(app.prefill.llm_config) == {
        "model_loading_config": {"model_id": "demo", "model_source": str(small_model)},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundle_per_worker": {"CPU": 1}, "strategy": "STRICT_PACK"},
        "engine_kwargs": {
            "tensor_parallel_size": 1,
            "dtype": "bfloat16",
            "kv_cache_dtype": "auto",
            "max_model_len": 2048,
            "block_size": 32,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 268435456,
            "gpu_memory_utilization": 0.9,
            "enable_per_request_metrics": True,
            "enforce_eager": True,
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_producer",
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"kv_lease_duration": 30, "num_threads": 1},
            },
        },
        "deployment_config": {
            "num_replicas": 1,
            "max_ongoing_requests": 1000,
            "max_constructor_retry_count": 1,
            "ray_actor_options": {"num_cpus": 0},
            "placement_group_bundle_label_selector": [
                {ROLE_LABEL: "prefill", NODE_LABEL: "in(laptop)"}
            ],
        },
        "experimental_configs": {
            "stream_batching_interval_ms": 0,
            "NIXL_SIDE_CHANNEL_PORT_BASE": 20000,
        },
        "runtime_env": {
            "env_vars": {
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "HF_HUB_OFFLINE": "1",
                "MINICLUSTER_KEEP_AFFINITY": "1",
                CORES: "0",
                "UCX_TLS": "tcp,sm,self",
                "UCX_NET_DEVICES": "lo",
            }
        },
        "log_engine_metrics": False,
    }


def test_decode_consumes_and_recovers(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """Decode consumes, prefills for itself what it could not fetch, and has its own ports."""
    app = compile_app(make_deployment(small_model), "cpu")
    transfer = app.decode.llm_config["engine_kwargs"]["kv_transfer_config"]
    assert transfer["kv_role"] == "kv_consumer"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert app.decode.llm_config["experimental_configs"]["NIXL_SIDE_CHANNEL_PORT_BASE"] == 22000


def test_same_deployment_same_app(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """Compiling is a function: equal input, equal JSON."""
    first, second = (compile_app(make_deployment(small_model), "cpu") for _ in range(2))
    assert json.dumps(asdict(first)) == json.dumps(asdict(second))


def test_gpu_target(
    small_model: Path, make_deployment: DeploymentMaker, make_pool: PoolMaker
) -> None:
    """On GPUs the same code asks for GPU bundles of that type and leaves CPU settings out."""
    pools = {
        role: make_pool(
            role,
            tp=4,
            gpu="h100",
            placement=(Placement(node="node-0", gpus=gpus),),
        )
        for role, gpus in (("prefill", (0, 1, 2, 3)), ("decode", (4, 5, 6, 7)))
    }
    app = compile_app(make_deployment(small_model, **pools), "gpu")
    config = app.decode.llm_config
    assert config["accelerator_type"] == "H100"
    assert config["placement_group_config"]["bundle_per_worker"] == {"CPU": 1, "GPU": 1}
    assert config["engine_kwargs"]["tensor_parallel_size"] == 4
    assert "accelerator_config" not in config
    assert "enforce_eager" not in config["engine_kwargs"]
    assert "kv_buffer_device" not in config["engine_kwargs"]["kv_transfer_config"]
    assert not {CORES, "UCX_TLS"} & set(config["runtime_env"]["env_vars"])
    assert [node.gpus for node in app.nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_across_hosts_no_shared_memory(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """Between hosts only TCP is offered, with a lease short enough to keep prefill moving."""
    config = compile_app(make_deployment(small_model), "cpu", one_host=False).prefill.llm_config
    assert config["runtime_env"]["env_vars"]["UCX_TLS"] == "tcp,self"
    extra = config["engine_kwargs"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["kv_lease_duration"] == 4


@given(
    replicas=st.integers(1, 6),
    tp=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 512),
    tokens=st.integers(512, 16384),
    kv_bytes=st.floats(1e6, 1e12),
)
def test_plan_decides_every_number(  # noqa: PLR0913, PLR0917  (one argument a number)
    small_model: Path,
    make_deployment: DeploymentMaker,
    make_pool: PoolMaker,
    replicas: int,
    tp: int,
    batch: int,
    tokens: int,
    kv_bytes: float,
) -> None:
    """Replicas, TP, batch limits and KV bytes are those of the plan, and raylets hold its cores."""
    count = replicas * tp
    decode = make_pool(
        "decode",
        replicas=replicas,
        tp=tp,
        max_batch_size=batch,
        max_batched_tokens=tokens,
        kv_bytes=kv_bytes,
        placement=tuple(
            Placement(node=f"n{i % 2}", gpus=tuple(range(1 + i * tp, 1 + (i + 1) * tp)))
            for i in range(replicas)
        ),
    )
    app = compile_app(make_deployment(small_model, decode=decode), "cpu")
    config = app.decode.llm_config
    assert config["deployment_config"]["num_replicas"] == replicas
    assert config["engine_kwargs"]["tensor_parallel_size"] == tp
    assert config["engine_kwargs"]["max_num_seqs"] == batch
    assert config["engine_kwargs"]["max_num_batched_tokens"] == tokens
    assert config["engine_kwargs"]["kv_cache_memory_bytes"] == int(kv_bytes)
    cores = config["runtime_env"]["env_vars"][CORES]
    assert [len(replica.split("|")) for replica in cores.split(";")] == [tp] * replicas
    held = [core for node in app.nodes if node.role == "decode" for core in node.cores]
    assert sorted(held) == list(range(1, 1 + count))
    assert [core for replica in replica_devices(decode) for core in replica] == [
        core for placement in decode.placement for core in placement.gpus
    ]
