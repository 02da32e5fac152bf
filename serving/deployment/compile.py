"""From a plan to Ray Serve: a deployment per role and domain with its bounds, as plain data."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from minicluster.engine_model.planned_limits import planned_limits
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Plan, to_json
from minicluster.routing import find_policy, pool_policy
from serving.cluster.ports import NIXL_PORTS, NIXL_PORTS_APART
from serving.deployment.engine_args import SIMULATED, engine_kwargs, environment
from serving.deployment.simulated import simulated_engines, simulated_settings, slowed
from serving.protocol.app_spec import RayNode, ServedApp, ServedPool, pool_prefix
from serving.protocol.messages import EndpointConfig, PoolConfig, SimulatedEngines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minicluster.plan import Deployment, Plan, Pool
    from serving.deployment.engine_args import DeployTarget


DEADLINE_FACTOR = 2.0
"""The deadlines of prefill and of the KV hand-off, as multiples of the SLO's TTFT."""

UNPLANNED_DEADLINE_S = 600.0
"""
Either deadline where no plan names a TTFT. The speed of the machine is not known yet, so the limit
only catches transfers that never arrive.
"""


def endpoint_config(  # noqa: PLR0913  (what an endpoint is told, by name)
    deployment: Deployment,
    *,
    domains: Mapping[str, str],
    ongoing: Mapping[str, int],
    plan: Plan | None = None,
    plan_hash: str = "",
    simulated: SimulatedEngines | None = None,
    deadlines_s: tuple[float | None, float | None] = (None, None),
    adapters: tuple[str, ...] = (),
) -> EndpointConfig:
    """
    Take from the plan what answering requests needs.

    Args:
        deployment: what is to run.
        domains: domain of each node of the placement.
        ongoing: requests that a replica has at once, by role.
        plan: plan behind the deployment, if there is one.
        plan_hash: hash of its file.
        simulated: settings of simulated engines, if the pools have them.
        deadlines_s: limits of prefill and of the KV hand-off; `None`: twice the SLO's TTFT.
        adapters: names of LoRA adapters.
    """
    pools = tuple(
        PoolConfig(
            role=pool.role,
            gpu=pool.gpu,
            tp=pool.tp,
            replicas=engines_by_domain(pool, domains),
            max_num_seqs=pool.max_num_seqs * pool.pp,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            kv_bytes=pool.kv_bytes,
            policy=(policy := pool_policy(pool.role, deployment.routing.policy)),
            cached_tokens=planned_limits(deployment, pool).max_tokens
            if find_policy(policy).by_prefix
            else 0,
            max_ongoing_requests=ongoing[pool.role],
        )
        for pool in deployment.pools
    )
    prefill_deadline_s, kv_deadline_s = deadlines(plan, deadlines_s)
    return EndpointConfig(
        model_id=deployment.model.id,
        max_model_len=deployment.engine.max_model_len,
        block_size=deployment.engine.block_size,
        plan_hash=plan_hash,
        slo=plan.slo if plan else None,
        prediction=plan.prediction if plan else None,
        workload=plan.workload if plan else None,
        confidence_fraction=plan.confidence.fraction if plan and plan.confidence else None,
        step_model=plan.step_model if plan else None,
        prefill_deadline_s=prefill_deadline_s,
        kv_wait_deadline_s=kv_deadline_s,
        routing=deployment.routing,
        pools=pools,
        pairing=_pairing(pools),
        simulated=simulated,
        tokens_per_step=1.0 + deployment.engine.mean_accepted_tokens,
        adapters=adapters,
        vocab_size=deployment.model.vocab_size,
    )


def deadlines(
    plan: Plan | None, overrides_s: tuple[float | None, float | None]
) -> tuple[float, float]:
    """Return the deadlines of prefill and of the KV hand-off, seconds: overridden or planned."""
    planned_s = UNPLANNED_DEADLINE_S if plan is None else DEADLINE_FACTOR * plan.slo.ttft_s
    return overrides_s[0] or planned_s, overrides_s[1] or planned_s


def engines_by_domain(pool: Pool, domains: Mapping[str, str]) -> dict[str, int]:
    """
    Count the engines of a pool in each domain; Ray Serve calls them replicas.

    The copies of attention of one replica are one group, which counts where its first GPU is.
    """
    width = pool.gpus // pool.replicas
    flat = [domains[placed.node] for placed in pool.placement for _ in placed.gpus]
    groups = Counter(flat[::width])
    return {domain: pool.dp * number for domain, number in groups.items()}


def _pairing(pools: tuple[PoolConfig, ...]) -> dict[str, tuple[str, ...]]:
    prefill = [domain for pool in pools if pool.role == "prefill" for domain in pool.replicas]
    return {
        domain: tuple(sorted(prefill, key=lambda each: (each != domain, each)))
        for pool in pools
        if pool.role != "prefill"
        for domain in pool.replicas
    }


PLAN_HASH_DIGITS = 16

ONE_DOMAIN = "d0"

IN_ONE_THREAD = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""
Environment of every replica. By default Serve passes each message from thread to thread, for user
code that blocks; ours does not block. The command that deploys does, and keeps the default.
"""

UNPLANNED_REQUESTS = 1_000
"""Requests that a replica takes at once where no plan gives a number."""

HEALTH_CHECK_S = 5.0

HEALTH_LIMIT_S = 30.0
"""Interval and limit of a replica's health check; a replica with a full batch answers slowly."""

STARTED_AT_ONCE = 16
"""Simulated replicas that Ray starts at a time, by the cores that it is told of."""

DRAIN_POLL_S = 2.0
"""Interval at which a draining replica checks whether its last request has ended."""

DRAIN_LIMIT_S = 300.0
"""Longest time that `serving down` waits for answers under way, and then for replicas to end."""

DRAIN_FACTOR = 2.0
"""Time to drain, as a multiple of the plan's longest request; machines can be slower."""

UNPLANNED_DRAIN_S = 60.0

Place = tuple[tuple[str, int], ...]
"""Node and device of each worker of one replica."""


def compile_app(
    deployment: Deployment,
    target: DeployTarget,
    *,
    plan: Plan | None = None,
) -> ServedApp:
    """
    Compile a deployment that `serving.deployment.feasibility` found realisable for *target*.

    A *plan* behind it bounds the queues and gives the endpoint its SLO.
    """
    node_domains = domains(deployment, plan)
    shown = plan if plan is None or target.kind != SIMULATED else slowed(plan, target.slowdown)
    bounds = {
        pool.role: limits(
            pool, shown, deadlines_s=target.deadlines_s, token_limit=target.token_limit
        )
        for pool in deployment.pools
    }
    pools = []
    for pool in deployment.pools:
        pools += _pools(deployment, pool, node_domains, target, bounds[pool.role], plan)
    return ServedApp(
        model_id=deployment.model.id,
        pools=tuple(pools),
        endpoint_hosts=target.endpoint_hosts,
        endpoints=_endpoints(target, plan),
        nodes=ray_nodes(deployment, target.kind, target.generation),
        endpoint=endpoint_config(
            deployment,
            domains=node_domains,
            ongoing={role: bound["max_ongoing_requests"] for role, bound in bounds.items()},
            plan=shown,
            plan_hash=hash_of(plan or deployment),
            simulated=simulated_engines(deployment, target) if target.kind == SIMULATED else None,
            deadlines_s=target.deadlines_s,
            adapters=tuple(target.lora_modules),
        ),
    )


def _planned_endpoints(plan: Plan | None, slowdown: float) -> int:
    if plan is None or plan.endpoint is None:
        return 1
    return math.ceil(plan.endpoint.processes / slowdown)


def _endpoints(target: DeployTarget, plan: Plan | None) -> int:
    wanted = target.endpoints or _planned_endpoints(plan, target.slowdown)
    return math.ceil(wanted / target.endpoint_hosts) * target.endpoint_hosts


def hash_of(plan: Plan | Deployment) -> str:
    """Return the name of a plan, which its text determines."""
    return hashlib.sha256(to_json(plan).encode()).hexdigest()[:PLAN_HASH_DIGITS]


def limits(
    pool: Pool,
    plan: Plan | None,
    *,
    deadlines_s: tuple[float | None, float | None] = (None, None),
    token_limit: int | None = None,
) -> dict[str, Any]:
    """
    Return the Ray Serve options of one deployment that bound its queues and its drain.

    A replica takes its batch and, beyond it, what it can serve within the prefill deadline:
    `capacity x deadline` requests (Little's law). These queue in the engine, first come first
    served; any further one would be late. The endpoint holds as many again for each replica.
    """
    common = {
        "health_check_period_s": HEALTH_CHECK_S,
        "health_check_timeout_s": HEALTH_LIMIT_S,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_S,
    }
    if plan is None:
        return {
            **common,
            "max_ongoing_requests": UNPLANNED_REQUESTS,
            "graceful_shutdown_timeout_s": UNPLANNED_DRAIN_S,
        }
    prefill_s, handoff_s = deadlines(plan, deadlines_s)
    rate = max(plan.prediction.capacity_requests_per_s, plan.workload.requests_per_s)
    waiting = math.ceil(rate / pool.engines * prefill_s)
    slots = pool.max_num_seqs * pool.pp
    # A draining prefill replica stays until its last KV cache is fetched, or is past its deadline.
    longest_s = prefill_s + DRAIN_POLL_S + handoff_s
    if pool.role != "prefill":  # the longest answer that a client may ask for
        step_s = plan.slo.per_token_s or plan.prediction.tpot.p99_s
        context = plan.engine.max_model_len
        longest_s += min(token_limit or context, context) * step_s
    return {
        **common,
        "max_ongoing_requests": slots + waiting,
        "graceful_shutdown_timeout_s": float(math.ceil(DRAIN_FACTOR * longest_s)),
    }


def domains(deployment: Deployment, plan: Plan | None) -> dict[str, str]:
    """
    Return the domain of each node: GPUs joined by scale-up links.

    Domains count where each holds the same share of both pools: KV caches then stay inside their
    domain, and every replica is as busy as planned. Elsewhere all nodes are one domain, because a
    pool paired with too little of the other one would queue, or idle.
    """
    nodes = {placement.node for pool in deployment.pools for placement in pool.placement}
    one = dict.fromkeys(sorted(nodes), ONE_DOMAIN)
    numbers = {} if plan is None else {n: plan.inputs.cluster.hb_domain(n) for n in nodes}
    if not numbers or None in numbers.values():
        return one
    names = {node: f"d{number}" for node, number in numbers.items()}
    shares = [
        {at: Fraction(n, pool.engines) for at, n in engines_by_domain(pool, names).items()}
        for pool in deployment.pools
    ]
    return names if len(shares) > 1 and all(share == shares[0] for share in shares) else one


def _pools(
    deployment: Deployment,
    pool: Pool,
    found: Mapping[str, str],
    target: DeployTarget,
    bounds: Mapping[str, Any],
    plan: Plan | None,
) -> list[ServedPool]:
    by_domain: dict[str, list[Place]] = {}
    for places in replica_places(pool):
        by_domain.setdefault(found[places[0][0]], []).extend(engine_places(pool, places))
    first = target.nixl_port + NIXL_PORTS_APART.get(pool.role, 0)
    served = []
    for number, (domain, members) in enumerate(by_domain.items()):
        # With room for the replicas that `serving scale` may add.
        port = first + number * (NIXL_PORTS // len(by_domain))
        nodes = sorted(node for node, of in found.items() if of == domain)
        # Of a simulated group one process has all ranks.
        replicas = len(members) // (pool.dp if target.kind == SIMULATED else 1)
        prefix = pool_prefix(pool.role, domain if len(by_domain) > 1 else "", target.generation)
        simulated = None
        if target.kind == SIMULATED:
            planned = tuple(place[0][0] for place in members[:: len(members) // replicas])
            simulated = simulated_settings(deployment, plan, pool, planned, target)
        served.append(
            ServedPool(
                role=pool.role,
                domain=domain,
                prefix=prefix,
                name=prefix + served_name(deployment.model.id),
                replicas=replicas,
                simulated=simulated,
                llm_config=_llm_config(deployment, pool, members, target)
                | {
                    "deployment_config": _deployment_config(pool, replicas, nodes) | dict(bounds),
                    "experimental_configs": {}
                    if pool.role == "mixed"
                    else {"NIXL_SIDE_CHANNEL_PORT_BASE": port},
                },
            )
        )
    return served


def _llm_config(
    deployment: Deployment,
    pool: Pool,
    members: list[Place],
    target: DeployTarget,
) -> dict[str, Any]:
    cpu = target.kind == "cpu"
    devices = [tuple(gpu for _, gpu in places) for places in members]
    return {
        "model_loading_config": {
            "model_id": deployment.model.id,
            "model_source": deployment.model.source,
        },
        "placement_group_config": {
            "bundle_per_worker": {"CPU": 1} if cpu else {"CPU": 1, "GPU": 1},
            # A replica inside one planned node must not be spread over several.
            "strategy": "STRICT_PACK"
            if all(len({node for node, _ in places}) == 1 for places in members)
            else "PACK",
        },
        "engine_kwargs": engine_kwargs(deployment, pool, target),
        "runtime_env": {"env_vars": environment(deployment, devices, target) | IN_ONE_THREAD},
        "log_engine_metrics": False,
        **({"accelerator_config": {"kind": "cpu"}} if cpu else {}),
        **({"accelerator_type": pool.ray_accelerator} if not cpu and pool.ray_accelerator else {}),
    }


def _deployment_config(pool: Pool, replicas: int, nodes: list[str]) -> dict[str, Any]:
    """
    Return number and place of the replicas.

    The label of the role selects the place; that of the node only separates domains, so that
    `serving scale` can give a pool another node of its domain.
    """
    return {
        "num_replicas": replicas,
        # A failed start is reported at once instead of being retried.
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundle_label_selector": [
            {ROLE_LABEL: pool.role, NODE_LABEL: f"in({','.join(nodes)})"}
        ],
    }


def served_name(model_id: str) -> str:
    """Return the model's part of a Serve deployment's name, as `build_llm_deployment` writes it."""
    return model_id.replace("/", "--").replace(".", "_")


def replica_places(pool: Pool) -> list[Place]:
    """Return the place of each replica, in the order of the plan's placement."""
    width = pool.gpus // pool.replicas
    flat = devices(pool)
    return [tuple(flat[start : start + width]) for start in range(0, len(flat), width)]


def engine_places(pool: Pool, places: Place) -> list[Place]:
    """Return the place of each engine of one replica: of each copy of attention."""
    width = len(places) // pool.dp
    return [places[start : start + width] for start in range(0, len(places), width)]


def devices(pool: Pool) -> list[tuple[str, int]]:
    """Return node and number of every device of a pool."""
    return [(placement.node, gpu) for placement in pool.placement for gpu in placement.gpus]


def kind_of(deployment: Deployment) -> str:
    """Return the kind of the planned devices, `cpu` or `gpu`."""
    return "cpu" if deployment.pools[0].gpu == "cpu" else "gpu"


def ray_nodes(deployment: Deployment, kind: str, generation: int = 1) -> tuple[RayNode, ...]:
    """
    Return a raylet for each pool's devices on each node; the rest is as in `DeployTarget`.

    Simulated engines need no devices: one raylet of this machine has them all.
    """
    if kind == SIMULATED:
        return (
            RayNode(node=SIMULATED, role=SIMULATED, cores=tuple(range(STARTED_AT_ONCE)), gpus=()),
        )
    shares: dict[tuple[str, str], list[int]] = {}
    for pool in sorted(deployment.pools, key=lambda each: each.role, reverse=True):
        for placement in pool.placement:
            shares.setdefault((pool.role, placement.node), []).extend(placement.gpus)
    return tuple(
        replace(ray_node(node, role, gpus, kind), generation=generation)
        for (role, node), gpus in shares.items()
    )


def ray_node(
    node: str, role: str, devices: Sequence[int], kind: str, *, moved: bool = False
) -> RayNode:
    """Return the raylet for devices of one node: cores where *kind* is `cpu`, else GPUs."""
    cores, gpus = (devices, ()) if kind == "cpu" else ((), devices)
    return RayNode(node=node, role=role, cores=tuple(cores), gpus=tuple(gpus), moved=moved)
