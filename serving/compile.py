"""From what is to run to how Ray Serve runs it: one `LLMConfig` per pool, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.affinity import KEEP_AFFINITY

if TYPE_CHECKING:
    from sizing.plan import Deployment, Pool

APP = "minicluster"
"""Name of the Ray Serve application."""

ROLE_LABEL = "minicluster-role"
NODE_LABEL = "minicluster-node"
CORES = "MINICLUSTER_CORES"
"""Environment variable: cores of each replica, replicas apart by `;`, workers by `|`."""

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
NIXL_PORT = 20_000
NIXL_PORTS_APART = {"prefill": 0, "decode": 2_000}
"""
Side-channel ports of each pool from `nixl_port` on; every worker of every replica takes the next.
"""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LEASE_S = {"shared memory": 30, "tcp": 4}
"""
How long prefill keeps KV blocks that nobody has fetched, by what carries them. Decode's heartbeats
come every lease / 6; over plain TCP they are also what keeps an idle prefill engine moving.
"""
QUEUE = 1_000
"""Requests a replica takes at once: the queue is the engine's, first come first served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One raylet: the share of one planned node that one pool has."""

    node: str
    role: str
    cores: tuple[int, ...]
    gpus: tuple[int, ...]

    @property
    def labels(self) -> dict[str, str]:
        """Labels by which the pool finds it."""
        return {ROLE_LABEL: self.role, NODE_LABEL: self.node}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """One pool as Ray Serve takes it; `llm_config` are the fields of `ray.serve.llm.LLMConfig`."""

    role: str
    name: str
    replicas: int
    llm_config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApp:
    """Everything that `serving up` starts: the same input gives the same value."""

    model_id: str
    max_model_len: int
    prefill: ServedPool
    decode: ServedPool
    nodes: tuple[RayNode, ...]

    @property
    def pools(self) -> tuple[ServedPool, ServedPool]:
        """Both pools, in the order in which a request visits them."""
        return self.prefill, self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """What the pools stand on: `carrier` moves KV caches, a key of `LEASE_S`."""

    target: str
    carrier: str
    nixl_port: int


def compile_app(
    deployment: Deployment,
    target: str,
    *,
    one_host: bool = True,
    nixl_port: int = NIXL_PORT,
    decode_engine_kwargs: Mapping[str, Any] | None = None,
) -> ServedApp:
    """
    Compile a deployment that `serving.validate` has no objection to.

    Args:
        deployment: what is to run.
        target: `cpu` or `gpu`; on a CPU the plan's GPUs are core numbers.
        one_host: every planned node is this machine, whatever it is called.
        nixl_port: first of the ports at which the engines ask each other where the KV cache is.
        decode_engine_kwargs: further vLLM arguments of the decode pool; tests plant faults there.
    """
    ground = _Ground(
        target=target,
        carrier="shared memory" if one_host or target == "gpu" else "tcp",
        nixl_port=nixl_port,
    )
    return ServedApp(
        model_id=deployment.model.id,
        max_model_len=deployment.engine.max_model_len,
        prefill=_pool(deployment, deployment.pool("prefill"), ground, {}),
        decode=_pool(deployment, deployment.pool("decode"), ground, decode_engine_kwargs or {}),
        nodes=_ray_nodes(deployment, target),
    )


def _pool(
    deployment: Deployment, pool: Pool, ground: _Ground, extra: Mapping[str, Any]
) -> ServedPool:
    """Compile one pool."""
    nodes = sorted({placement.node for placement in pool.placement})
    selector = {ROLE_LABEL: pool.role, NODE_LABEL: f"in({','.join(nodes)})"}
    per_worker = {"CPU": 1} if ground.target == "cpu" else {"CPU": 1, "GPU": 1}
    llm_config: dict[str, Any] = {
        "model_loading_config": {
            "model_id": deployment.model.id,
            "model_source": deployment.model.source,
        },
        "placement_group_config": {
            "bundle_per_worker": per_worker,
            # A replica that one planned node holds must not be torn apart.
            "strategy": "STRICT_PACK" if _fits_a_node(pool) else "PACK",
        },
        "engine_kwargs": {**_engine_kwargs(deployment, pool, ground), **extra},
        "deployment_config": {
            "num_replicas": pool.replicas,
            "max_ongoing_requests": QUEUE,
            # A start that fails is told at once instead of being tried again and again.
            "max_constructor_retry_count": 1,
            "ray_actor_options": {"num_cpus": 0},
            "placement_group_bundle_label_selector": [selector],
        },
        "experimental_configs": {
            # Ray's default gathers tokens for 50 ms; we promise their latency one by one.
            "stream_batching_interval_ms": 0,
            "NIXL_SIDE_CHANNEL_PORT_BASE": ground.nixl_port + NIXL_PORTS_APART[pool.role],
        },
        "runtime_env": {"env_vars": _environment(deployment, pool, ground)},
        "log_engine_metrics": False,
    }
    if ground.target == "cpu":
        llm_config["accelerator_config"] = {"kind": "cpu"}
    else:
        llm_config["accelerator_type"] = pool.gpu.upper()
    return ServedPool(
        role=pool.role,
        name=f"{pool.role.capitalize()}:" + served_name(deployment.model.id),
        replicas=pool.replicas,
        llm_config=llm_config,
    )


def served_name(model_id: str) -> str:
    """Return the model's part of a Serve deployment's name, as `build_llm_deployment` writes it."""
    return model_id.replace("/", "--").replace(".", "_")


def _engine_kwargs(deployment: Deployment, pool: Pool, ground: _Ground) -> dict[str, Any]:
    """Return vLLM's engine arguments."""
    engine = deployment.engine
    kv_transfer: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[pool.role],
        # One UCX worker: each further one has its own connection to set up, and stalls on it, long
        # after the deployment was found ready.
        "kv_connector_extra_config": {
            "kv_lease_duration": LEASE_S[ground.carrier],
            "num_threads": 1,
        },
    }
    if pool.role == "decode":
        # A pull that fails costs one request a local prefill; it is no error for the user.
        kv_transfer["kv_load_failure_policy"] = "recompute"
    kwargs: dict[str, Any] = {
        "tensor_parallel_size": pool.tp,
        "dtype": DTYPES.get(pool.dtype, "auto"),
        "kv_cache_dtype": "auto" if engine.kv_dtype == pool.dtype else engine.kv_dtype,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "max_num_seqs": pool.max_batch_size,
        "max_num_batched_tokens": pool.max_batched_tokens,
        "kv_cache_memory_bytes": int(pool.kv_bytes),
        "gpu_memory_utilization": engine.memory_fraction,
        "enable_per_request_metrics": True,
        "kv_transfer_config": kv_transfer,
    }
    if ground.target == "cpu":
        kwargs["enforce_eager"] = True
        kv_transfer["kv_buffer_device"] = "cpu"
    elif pool.dtype == "fp8":
        kwargs["quantization"] = "fp8"
    return kwargs


def _environment(deployment: Deployment, pool: Pool, ground: _Ground) -> dict[str, str]:
    """Return the environment of the pool's processes."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if deployment.model.source.startswith("/"):
        environment["HF_HUB_OFFLINE"] = "1"
    if ground.target == "cpu":
        environment[KEEP_AFFINITY] = "1"
        environment[CORES] = ";".join("|".join(map(str, cores)) for cores in replica_devices(pool))
        # Over plain TCP a read stalls for seconds while the prefill engine idles (ADR 0101).
        environment["UCX_TLS"] = "tcp,sm,self" if ground.carrier == "shared memory" else "tcp,self"
        if ground.carrier == "shared memory":
            environment["UCX_NET_DEVICES"] = "lo"
    return environment


def replica_devices(pool: Pool) -> list[tuple[int, ...]]:
    """Return the GPUs (cores) of each replica, in the order of the placement."""
    width = pool.tp * pool.pp
    flat = [gpu for placement in pool.placement for gpu in placement.gpus]
    return [tuple(flat[start : start + width]) for start in range(0, len(flat), width)]


def _fits_a_node(pool: Pool) -> bool:
    """Tell whether each replica has all its GPUs in one entry of the placement."""
    return all(len(placement.gpus) % (pool.tp * pool.pp) == 0 for placement in pool.placement)


def _ray_nodes(deployment: Deployment, target: str) -> tuple[RayNode, ...]:
    """Return a raylet for each pool's share of each node, so that labels alone decide the place."""
    shares: dict[tuple[str, str], list[int]] = {}
    for pool in sorted(deployment.pools, key=lambda each: each.role, reverse=True):
        for placement in pool.placement:
            shares.setdefault((pool.role, placement.node), []).extend(placement.gpus)
    return tuple(
        RayNode(
            node=node,
            role=role,
            cores=tuple(gpus) if target == "cpu" else (),
            gpus=() if target == "cpu" else tuple(gpus),
        )
        for (role, node), gpus in shares.items()
    )
