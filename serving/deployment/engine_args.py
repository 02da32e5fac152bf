"""vLLM's arguments and environment, from the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minicluster.engine_model.planned_limits import pool_pages
from minicluster.engine_model.true_steps import TrueSteps
from minicluster.plan.vllm_args import (
    DTYPES,
    KV_ROLES,
    SCHEDULER_OPTIONS,
    all_to_all_backend,
    kv_cache_dtype,
    kv_transfer_config,
    redundant_experts,
    two_batch_overlap,
    vllm_arguments,
)
from serving.api.access import names_in
from serving.cluster.ports import NIXL_PORT
from serving.cluster.processes import KEEP_AFFINITY
from serving.protocol.app_spec import CORES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.plan import Deployment, Pool

SIMULATED = "simulated"
"""Kind of a target whose engines are simulated."""

MEDIA_DOMAINS = "MINICLUSTER_MEDIA_DOMAINS"
"""
Environment variable of `serving up`: hosts, separated by commas, from which engines of multimodal
models may fetch images, sounds and videos that a request names by URL. None by default: a client
could have the engines ask any address of the hosts' network.
"""

NO_MEDIA = ("none.invalid",)
"""The allowed hosts if there are none: vLLM takes an empty list for all, and this name is of no
host (RFC 6761)."""

LEASE_S = {"shared memory": 30, "tcp": 4}
"""
Time that prefill keeps KV blocks which are not fetched, by transport. Decode sends a heartbeat
every lease / 6; over plain TCP these also keep the transfers of an idle prefill engine moving.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployTarget:
    """
    The machines that a plan is compiled for, and the overrides of the plan.

    Attributes:
        kind: `cpu`, `gpu` or `simulated`; on a CPU the plan's GPUs are core numbers.
        slowdown: clock seconds for each second of a simulated engine.
        truth: step times of simulated engines; `None`: the plan's.
        one_host: all planned nodes are this machine, whatever their names.
        gpus: this machine's GPU in place of each of the plan's; one that is named several times is
            shared. None: they are the plan's.
        nixl_port: first port at which the engines exchange the places of KV caches.
        deadlines_s: limits of prefill and of the KV hand-off; `None`: the plan's.
        token_limit: most tokens of one answer; `None`: what the context has room for.
        media_domains: hosts from which engines may fetch what a request names by URL.
        lora_modules: folders of LoRA adapters by name, of which simulated engines take the names.
        endpoints: number of endpoint processes; `None`: the plan's, or one.
        endpoint_hosts: hosts over which they are spread; 1: all are on the head's.
        generation: number of the plan's replicas; each `serving up --replace` begins the next.
    """

    kind: str
    slowdown: float = 1.0
    truth: TrueSteps | None = None
    one_host: bool = True
    gpus: tuple[int, ...] = ()
    nixl_port: int = NIXL_PORT
    deadlines_s: tuple[float | None, float | None] = (None, None)
    token_limit: int | None = None
    media_domains: tuple[str, ...] = NO_MEDIA
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    endpoints: int | None = None
    endpoint_hosts: int = 1
    generation: int = 1

    @property
    def transport(self) -> str:
        """The transport of KV caches, a key of `LEASE_S`."""
        return "shared memory" if self.one_host or self.kind == "gpu" else "tcp"


def read_media_domains(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that `MEDIA_DOMAINS` names, or one that does not exist."""
    return names_in(environment, MEDIA_DOMAINS) or NO_MEDIA


def engine_kwargs(deployment: Deployment, pool: Pool, target: DeployTarget) -> dict[str, Any]:
    """Return vLLM's engine arguments: the plan's, and those of this endpoint."""
    kwargs = vllm_arguments(deployment, pool)
    kwargs |= {
        "enable_per_request_metrics": True,
        "allowed_media_domains": list(target.media_domains),
    }
    nixl = _kv_transfer(pool, target) if pool.role in KV_ROLES else None
    connectors = kv_transfer_config(deployment, pool, nixl)
    if connectors is not None:
        kwargs["kv_transfer_config"] = connectors
    if target.kind == "cpu":
        kwargs["enforce_eager"] = True
    if target.lora_modules:
        # Of vLLM's server, which loads all adapters when it starts.
        named = target.lora_modules.items()
        kwargs["lora_modules"] = [{"name": name, "path": path} for name, path in named]
    return kwargs


def _kv_transfer(pool: Pool, target: DeployTarget) -> dict[str, Any]:
    kv_transfer: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[pool.role],
        # One UCX worker: each further one sets up its own connection, and stalls on that long after
        # the deployment was found ready.
        "kv_connector_extra_config": {
            "kv_lease_duration": LEASE_S[target.transport],
            "num_threads": 1,
        },
    }
    if pool.role == "decode":
        # A failed pull costs one request a local prefill; the user sees no error.
        kv_transfer["kv_load_failure_policy"] = "recompute"
    if target.kind == "cpu":
        kv_transfer["kv_buffer_device"] = "cpu"
    return kv_transfer


def environment(
    deployment: Deployment, replicas: Sequence[tuple[int, ...]], target: DeployTarget
) -> dict[str, str]:
    """Return the environment of a pool's processes; *replicas* are the devices of each."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",  # to hosts that are not allowed
    }
    if deployment.model.source.startswith("/"):
        variables["HF_HUB_OFFLINE"] = "1"
    if target.kind == "cpu":
        variables[KEEP_AFFINITY] = "1"
        variables[CORES] = ";".join("|".join(map(str, cores)) for cores in replicas)
        # Over plain TCP a read stalls for seconds while the prefill engine is idle (ADR 0101).
        variables["UCX_TLS"] = "tcp,sm,self" if target.transport == "shared memory" else "tcp,self"
        if target.transport == "shared memory":
            variables["UCX_NET_DEVICES"] = "lo"
    return variables


def planned_facts(deployment: Deployment, pool: Pool) -> dict[str, Any]:
    """Return the settings that a plan decides, as an engine reports them."""
    engine = deployment.engine
    nixl = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES.get(pool.role)}
    connectors = kv_transfer_config(deployment, pool, nixl if pool.role in KV_ROLES else None) or {}
    return {
        "tp": pool.tp,
        "pp": pool.pp,
        "dp": pool.dp,
        "ep": pool.ep,
        "max_num_seqs": pool.max_num_seqs,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        **{name: getattr(engine, name) for name in SCHEDULER_OPTIONS},
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_model_len": engine.max_model_len,
        "block_size": pool_pages(deployment, pool).block_tokens,
        "kv_bytes": int(pool.kv_bytes),
        "kv_dtype": kv_cache_dtype(deployment, pool),
        "model": deployment.model.source,
        "kv_connector": connectors.get("kv_connector"),
        "kv_role": connectors.get("kv_role"),
        "speculative_tokens": engine.speculative_tokens,
        "redundant_experts": redundant_experts(deployment, pool),
        "all_to_all_backend": all_to_all_backend(deployment, pool),
        "two_batch_overlap": two_batch_overlap(deployment, pool),
        "lora": None
        if engine.lora is None
        else {
            "max_loras": engine.lora.max_loras,
            "max_lora_rank": engine.lora.max_lora_rank,
            "max_cpu_loras": engine.lora.max_cpu_loras,
            "target_modules": list(engine.lora.target_modules),
        },
        **({"dtype": DTYPES[pool.dtype]} if pool.dtype in DTYPES else {}),
    }
