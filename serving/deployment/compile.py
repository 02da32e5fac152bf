"""From what is to run to how Ray Serve runs it: a deployment per role and domain, plain data."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from minicluster.plan import NODE_LABEL, ROLE_LABEL, to_json
from serving.cluster.ports import NIXL_PORTS, NIXL_PORTS_APART
from serving.deployment.engine_args import accelerator, engine_kwargs, environment
from serving.deployment.limits import limits
from serving.protocol.app_spec import RayNode, ServedApp, ServedPool
from serving.protocol.endpoint_config import front_door, replicas_by_domain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Deployment, Plan, Pool
    from serving.deployment.engine_args import DeployTarget

ONE_DOMAIN = "d0"
IN_ONE_THREAD = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""
Environment of every replica: Serve would pass each message from thread to thread, for code that
blocks; ours does not. Not of the command that deploys: its calls do block.
"""


def compile_app(
    deployment: Deployment,
    ground: DeployTarget,
    *,
    plan: Plan | None = None,
    substitutions: tuple[str, ...] = (),
) -> ServedApp:
    """
    Compile a deployment that `serving.deployment.feasibility` has no objection to.

    Args:
        deployment: what is to run.
        ground: what it stands on.
        plan: the plan behind it, which bounds queues and says what the front door promises.
        substitutions: what *deployment* has otherwise than the plan.
    """
    found = domains(deployment, plan)
    # What is deployed otherwise than planned keeps no promise of the plan's.
    promised = None if substitutions else plan
    bounds = {
        pool.role: limits(
            pool, promised, deadlines_s=ground.deadlines_s, token_limit=ground.token_limit
        )
        | _routed(deployment, pool)
        for pool in deployment.pools
    }
    front = front_door(
        deployment,
        domains=found,
        plan=promised,
        plan_hash=plan_hash(to_json(plan or deployment)),
        substitutions=substitutions,
        deadlines_s=ground.deadlines_s,
    )
    return ServedApp(
        model_id=deployment.model.id,
        pools=tuple(
            served
            for pool in deployment.pools
            for served in _pools(deployment, pool, found, ground, bounds[pool.role])
        ),
        nodes=ray_nodes(deployment, ground.target),
        front=front,
    )


def plan_hash(text: str) -> str:
    """Return what `status` calls a plan: SHA-256 of its file, 16 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def domains(deployment: Deployment, plan: Plan | None) -> dict[str, str]:
    """
    Return the domain of each node: GPUs joined by scale-up links, where that decides anything.

    It does where each domain holds the same share of both pools: prompts then stay at home, and
    every replica is as busy as planned. Elsewhere all nodes are one domain: a pool that is paired
    with too little of the other one would queue, or idle.
    """
    nodes = {placement.node for pool in deployment.pools for placement in pool.placement}
    one = dict.fromkeys(sorted(nodes), ONE_DOMAIN)
    numbers = {} if plan is None else {n: plan.inputs.cluster.hb_domain(n) for n in nodes}
    if not numbers or None in numbers.values():
        return one
    found = {node: f"d{number}" for node, number in numbers.items()}
    shares = [
        {at: Fraction(n, pool.replicas) for at, n in replicas_by_domain(pool, found).items()}
        for pool in deployment.pools
    ]
    return found if len(shares) > 1 and all(share == shares[0] for share in shares) else one


def _pools(
    deployment: Deployment,
    pool: Pool,
    found: Mapping[str, str],
    ground: DeployTarget,
    bounds: Mapping[str, Any],
) -> list[ServedPool]:
    """Compile one role: a deployment for each domain, each with ports of its own."""
    replicas = replica_places(pool)
    by_domain: dict[str, list[tuple[tuple[str, int], ...]]] = {}
    for places in replicas:
        by_domain.setdefault(found[places[0][0]], []).append(places)
    first = ground.nixl_port + NIXL_PORTS_APART.get(pool.role, 0)
    served = []
    for number, (domain, members) in enumerate(by_domain.items()):
        # Apart by room for the replicas that `serving scale` may add.
        port = first + number * (NIXL_PORTS // len(by_domain))
        nodes = sorted(node for node, of in found.items() if of == domain)
        prefix = pool.role.capitalize() + (f"-{domain}:" if len(by_domain) > 1 else ":")
        served.append(
            ServedPool(
                role=pool.role,
                domain=domain,
                prefix=prefix,
                name=prefix + served_name(deployment.model.id),
                replicas=len(members),
                llm_config=_llm_config(deployment, pool, members, ground)
                | {"deployment_config": _deployment_config(pool, len(members), nodes, bounds)}
                | {"experimental_configs": _experimental(pool, port)},
            )
        )
    return served


def _llm_config(
    deployment: Deployment,
    pool: Pool,
    members: list[tuple[tuple[str, int], ...]],
    ground: DeployTarget,
) -> dict[str, Any]:
    """Return what says how each replica's engine is made."""
    cpu = ground.target == "cpu"
    devices = [tuple(gpu for _, gpu in places) for places in members]
    return {
        "model_loading_config": {
            "model_id": deployment.model.id,
            "model_source": deployment.model.source,
        },
        "placement_group_config": {
            "bundle_per_worker": {"CPU": 1} if cpu else {"CPU": 1, "GPU": 1},
            # A replica that one planned node holds must not be torn apart.
            "strategy": "STRICT_PACK"
            if all(len({node for node, _ in places}) == 1 for places in members)
            else "PACK",
        },
        "engine_kwargs": engine_kwargs(deployment, pool, ground),
        "runtime_env": {"env_vars": environment(deployment, devices, ground) | IN_ONE_THREAD},
        "log_engine_metrics": False,
        **({"accelerator_config": {"kind": "cpu"}} if cpu else accelerator(pool.gpu)),
    }


def _deployment_config(
    pool: Pool, replicas: int, nodes: list[str], bounds: Mapping[str, Any]
) -> dict[str, Any]:
    """
    Return how many replicas there are, where, and within which bounds.

    The label of the role decides the place; that of the node only keeps domains apart, so that
    `serving scale` can give a pool another node of its domain.
    """
    return {
        "num_replicas": replicas,
        # A start that fails is told at once instead of being tried again and again.
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundle_label_selector": [
            {ROLE_LABEL: pool.role, NODE_LABEL: f"in({','.join(nodes)})"}
        ],
        **bounds,
    }


def _experimental(pool: Pool, port: int) -> dict[str, Any]:
    """Return Ray's settings that have no place of their own."""
    # Ray's default gathers tokens for 50 ms; we promise their latency one by one.
    interval = {"stream_batching_interval_ms": 0}
    return interval if pool.role == "mixed" else {**interval, "NIXL_SIDE_CHANNEL_PORT_BASE": port}


def served_name(model_id: str) -> str:
    """Return the model's part of a Serve deployment's name, as `build_llm_deployment` writes it."""
    return model_id.replace("/", "--").replace(".", "_")


def replica_places(pool: Pool) -> list[tuple[tuple[str, int], ...]]:
    """Return node and device of each worker, replica after replica, as the plan places them."""
    width = pool.gpus // pool.replicas
    flat = [(placement.node, gpu) for placement in pool.placement for gpu in placement.gpus]
    return [tuple(flat[start : start + width]) for start in range(0, len(flat), width)]


def replica_devices(pool: Pool) -> list[tuple[int, ...]]:
    """Return the GPUs (cores) of each replica, in the order of the placement."""
    return [tuple(gpu for _, gpu in places) for places in replica_places(pool)]


def _routed(deployment: Deployment, pool: Pool) -> dict[str, Any]:
    """Return how requests find the replicas of a pool: prompts by the plan's policy."""
    if pool.role != "prefill":
        return {}
    policy = {"policy": deployment.routing.policy}
    return {
        "request_router_config": {
            "request_router_class": "serving.replicas.router.PlannedRouter",
            "request_router_kwargs": policy,
        }
    }


def ray_nodes(deployment: Deployment, target: str) -> tuple[RayNode, ...]:
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
