"""Verification: the differences between the plan and what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minicluster.plan import NODE_LABEL, ROLE_LABEL
from serving.deployment.compile import engine_places, replica_places
from serving.deployment.engine_args import SIMULATED, planned_facts
from serving.operations.status import FACTS_LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minicluster.plan import Deployment, Pool
    from serving.operations.status import Deployed, DeployedPool


def differences(
    deployment: Deployment,
    deployed: Deployed,
    target: str,
    bounds: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[str, ...]:
    """
    Compare a deployment with its plan, field by field.

    Args:
        deployment: the plan.
        deployed: what runs, with facts.
        target: `cpu`, `gpu` or `simulated`, whose devices are not compared, and of whose groups
            one process has all ranks.
        bounds: by role, the compiled options of Ray Serve (`serving.deployment.compile.limits`).

    Returns:
        Every difference as `place: deployed X, planned Y`; none: it is as planned.
    """
    texts: list[str] = []
    for pool in deployment.pools:
        running = deployed.pool(pool.role)
        texts += _pool(deployment, pool, running, target)
        wanted = (bounds or {}).get(pool.role, {})
        for name, options in running.options.items():
            texts += [
                f"{name}.{option}: deployed {options.get(option)}, planned {value}"
                for option, value in wanted.items()
                if options.get(option) != value
            ]
    return tuple(texts)


def _pool(deployment: Deployment, pool: Pool, running: DeployedPool, target: str) -> Iterator[str]:
    planned = pool.replicas if target == SIMULATED else pool.engines
    if running.replicas != planned:
        yield f"{pool.role}.replicas: deployed {running.replicas}, planned {planned}"
    wanted = planned_facts(deployment, pool)
    for number, fact in enumerate(running.facts):
        for name, value in wanted.items():
            if fact[name] != value:
                place = f"{pool.role}[{number}].{name}"
                yield f"{place}: deployed {fact[name]}, planned {value}"
    for name in running.silent:
        yield f"{name}.facts: not reported within {FACTS_LIMIT_S:g} s, so not compared"
    if not running.silent:
        yield from _places(pool, running.facts, target)


def _places(pool: Pool, facts: list[dict[str, Any]], target: str) -> Iterator[str]:
    width = pool.tp * pool.pp * (pool.dp if target == SIMULATED else 1)
    planned_nodes = sorted(
        placement.node for placement in pool.placement for _ in range(len(placement.gpus) // width)
    )
    nodes = sorted(str(fact["labels"].get(NODE_LABEL)) for fact in facts)
    # A replica wider than a node reports only its first worker's node.
    if planned_nodes and nodes != planned_nodes:
        yield f"{pool.role}.nodes: deployed {nodes}, planned {planned_nodes}"
    roles = {fact["labels"].get(ROLE_LABEL) for fact in facts} - {pool.role}
    if roles:
        yield f"{pool.role}.labels: deployed on nodes labelled {roles}, planned {pool.role}"
    if target == "cpu":
        engines = [
            engine for place in replica_places(pool) for engine in engine_places(pool, place)
        ]
        planned = sorted([[core] for _, core in place] for place in engines)
        bound = sorted(sorted(fact["cores"]) for fact in facts)
        if bound != planned:
            yield f"{pool.role}.cores: workers bound to {bound}, planned {planned}"
