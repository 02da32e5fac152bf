"""Scaling: more or fewer replicas of a pool without downtime, within the plan's devices."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError, NegativeAnswer, TargetFailed
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Placement, Pool, read_deployment, to_json
from serving.cluster.local_cluster import cluster_at, token_file
from serving.cluster.processes import RAYLET, environment, stop
from serving.cluster.raylets import join_nodes, raylet_mark
from serving.cluster.state import DEPLOYMENT, PLAN, write_state
from serving.deployment.compile import Place, devices, ray_node, replica_places
from serving.deployment.engine_args import SIMULATED
from serving.operations.status import by_role, cluster_status, running_app
from serving.protocol.app_spec import APP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minicluster.plan import Deployment
    from serving.cluster.state import State

LIMIT_S = 600.0
"""Longest start of a replica; the time to drain is added to it."""

SCALED = "(serving scale)"
"""Suffix of the state's changes that scaling made."""


def replica_changes(
    planned: Deployment, now: Deployment, wanted: Mapping[str, int]
) -> dict[str, int]:
    """
    Return the replicas of the pools that change, those that shrink first: others get their devices.

    Raises:
        InputError: no such pool, more devices than the plan has, or a pool of groups of engines,
            whose ranks start and end together.
    """
    for role in wanted:
        if (dp := now.pool(role).dp) > 1:
            raise InputError("scale", f"{role}, groups of {dp} engines", "dp 1 (plan again)")
    added = {role: replicas - now.pool(role).replicas for role, replicas in wanted.items()}
    gpus = sum(pool.gpus for pool in planned.pools)
    after = sum(pool.slicing.gpus * wanted.get(pool.role, pool.replicas) for pool in now.pools)
    if after > gpus:
        raise InputError("scale", f"{after} devices", f"at most the plan's {gpus} (plan again)")
    changed = sorted(filter(added.get, wanted), key=lambda role: added[role] > 0)
    return {role: wanted[role] for role in changed}


def scale(state: State, wanted: Mapping[str, int], report: Callable[[str], None]) -> State:
    """
    Scale the pools to *wanted* replicas, one pool after the other, without refusing a request.

    A replica that is removed finishes its requests first. On a cluster that serving started, a
    device that changes pools gets a raylet of its own, labelled for its new pool; elsewhere the
    cluster must have a free node of that role.

    Raises:
        InputError: as `replica_changes`.
        NegativeAnswer: there are several domains, or a foreign
            cluster has no free node.
        TargetFailed: replicas do not start or end in time.
    """
    planned, now = read_deployment(PLAN), read_deployment(DEPLOYMENT)
    for role, replicas in replica_changes(planned, now, wanted).items():
        pool, before = now.pool(role), (state, now)
        name, places = _deployment_name(state, role), replica_places(pool)[:replicas]
        grows = replicas > pool.replicas
        if grows:
            added = tuple(_free(planned, now)[: (replicas - pool.replicas) * pool.slicing.gpus])
            places.append(added)
            if state.target != SIMULATED:  # simulated engines hold no device
                _ensure_room(state, role, added, report)
        # Before the change: what cannot be recorded, on a full disk, must not be done.
        state, now = _record(state, planned, now, _with_places(pool, replicas, places))
        try:
            _set_replicas(state, name, role, replicas, report)
        except BaseException:  # the same command is to try it again
            write_state(before[0], {DEPLOYMENT: to_json(before[1])})
            raise
        if not grows:
            stayed = _remaining(state, pool, replicas)
            retire(state, role)
            if stayed != places:
                state, now = _record(state, planned, now, _with_places(pool, replicas, stayed))
    return state


def _free(planned: Deployment, now: Deployment) -> list[tuple[str, int]]:
    held = {device for pool in now.pools for device in devices(pool)}
    return [device for pool in planned.pools for device in devices(pool) if device not in held]


def _remaining(state: State, pool: Pool, replicas: int) -> list[Place]:
    places = replica_places(pool)
    if state.target == SIMULATED:
        return places[:replicas]
    kept = [
        sorted(
            (fact["labels"].get(NODE_LABEL), core) for worker in fact["cores"] for core in worker
        )
        for fact in cluster_status(state, facts=True).pool(pool.role).facts
    ]
    stayed = [place for place in places if sorted(place) in kept]
    return stayed if len(stayed) == replicas else places[:replicas]


def _with_places(pool: Pool, replicas: int, places: Sequence[Place]) -> Pool:
    placement = tuple(
        Placement(node=node, gpus=tuple(gpus))
        for place in places
        for node, gpus in _by_node(place).items()
    )
    spares = min(pool.spare_replicas, replicas)
    return replace(pool, replicas=replicas, placement=placement, spare_replicas=spares)


def _by_node(place: Place) -> dict[str, list[int]]:
    by_node: dict[str, list[int]] = {}
    for node, device in place:
        by_node.setdefault(node, []).append(device)
    return by_node


def _ensure_room(state: State, role: str, added: Place, report: Callable[[str], None]) -> None:
    """Start raylets of *role* for the *added* devices, if the cluster has no free ones."""
    kind = device_kind(state)
    if sum(int(free.get(kind, 0)) for _, free in role_nodes(state, role)) >= len(added):
        return
    token = token_file(state.address)
    if token is None:
        raise NegativeAnswer(
            f"no free node is labelled {ROLE_LABEL}={role}; start one with "
            f"--labels {ROLE_LABEL}={role},{NODE_LABEL}={added[0][0]}"
        )
    nodes = [
        ray_node(node, role, numbers, state.target, moved=True)
        for node, numbers in _by_node(added).items()
    ]
    report(f"starting {len(nodes)} raylet(s) for {role}")
    join_nodes(nodes, environment(cluster_id_of(state), token), address=state.address)


def cluster_id_of(state: State) -> str:
    """Return the mark of the cluster's processes; empty for a foreign cluster."""
    cluster = cluster_at(state.address)
    return state.cluster_id if cluster is None else cluster.cluster_id


def retire(state: State, role: str) -> None:
    """Stop our raylets that have no replica of *role* left; others take their devices."""
    cluster_id, kind = cluster_id_of(state), device_kind(state)
    if not cluster_id:
        return
    for node, free in role_nodes(state, role):
        empty = free.get(kind, 0) == node["Resources"].get(kind, 0)
        if empty and "node:__internal_head__" not in node["Resources"]:
            stop(raylet_mark(cluster_id, node["Labels"]), variable=RAYLET)


def device_kind(state: State) -> str:
    """Return Ray's name of the devices of a deployment."""
    return "CPU" if state.target == "cpu" else "GPU"


def role_nodes(state: State, role: str) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Return each live node of *role* as Ray describes it, with its free resources."""
    import ray  # noqa: PLC0415  (a second to import)

    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.cluster.serve_compat import free_resources  # noqa: PLC0415

    with connected(state.address):
        free = free_resources()
        return [
            (node, free.get(node["NodeID"], {}))
            for node in ray.nodes()
            if node["Alive"] and node["Labels"].get(ROLE_LABEL) == role
        ]


def _set_replicas(
    state: State, name: str, role: str, replicas: int, report: Callable[[str], None]
) -> None:
    from serving.cluster.connection import connected  # noqa: PLC0415  (a second to import)
    from serving.cluster.serve_compat import deployment_options, set_replicas  # noqa: PLC0415

    with connected(state.address):
        set_replicas(APP, name, replicas)
        limit_s = LIMIT_S + deployment_options(APP)[name]["graceful_shutdown_timeout_s"]
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            deployment = running_app().deployments.get(name)
            states = {} if deployment is None else dict(deployment.replica_states)
            report(f"{role}: {states.get('RUNNING', 0)} of {replicas} replicas")
            if states == {"RUNNING": replicas}:
                return
            time.sleep(0.5)
    raise TargetFailed(f"{name} did not reach {replicas} replicas in {limit_s:.0f} s")


def _deployment_name(state: State, role: str) -> str:
    from serving.cluster.connection import connected  # noqa: PLC0415

    with connected(state.address):
        deployments = dict(running_app().deployments)
    running = by_role(deployments, state.generation).get(role, {})
    if len(running) != 1:
        raise NegativeAnswer(
            f"{role} has {len(running)} deployments, one per domain; scale moves replicas inside "
            "one domain only (plan again)"
        )
    return next(iter(running))


def _record(
    state: State, planned: Deployment, now: Deployment, changed: Pool
) -> tuple[State, Deployment]:
    pools = tuple(changed if former.role == changed.role else former for former in now.pools)
    now = replace(now, pools=pools)
    scaled = tuple(
        f"pools[{before.role}].replicas: {after.replicas} instead of {before.replicas} {SCALED}"
        for before, after in zip(planned.pools, now.pools, strict=True)
        if after.replicas != before.replicas
    )
    state = replace(state, changes=scaled)
    write_state(state, {DEPLOYMENT: to_json(now)})
    return state, now
