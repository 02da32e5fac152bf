"""Scaling: more or fewer replicas of a pool without downtime, within the plan's devices."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError, NegativeAnswer, TargetFailed
from minicluster.files import write_atomically
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Placement, Pool, read_deployment, to_json
from serving.cluster.local_cluster import cluster_at, token_file
from serving.cluster.processes import RAYLET, environment, stop
from serving.cluster.raylets import join_nodes, raylet_mark
from serving.cluster.state import write_state
from serving.deployment.compile import Place, ray_node, replica_places
from serving.operations.status import by_role, cluster_status
from serving.protocol.app_spec import APP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minicluster.plan import Deployment
    from serving.cluster.state import State

LIMIT_S = 600.0
"""Longest start of a replica; the time to drain is added to it."""

SCALED = "(serving scale)"
"""Suffix of the state's changes that scaling made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChange:
    """A pool, and its replicas after the change."""

    pool: Pool
    replicas: int

    @property
    def grows(self) -> bool:
        """Whether replicas are added."""
        return self.replicas > self.pool.replicas


def replica_changes(
    planned: Deployment, now: Deployment, wanted: Mapping[str, int]
) -> tuple[ReplicaChange, ...]:
    """
    Return the pools that change, those that shrink first, because the others take their devices.

    Raises:
        InputError: no such pool, below one replica, or more devices than the plan has.
    """
    for role, replicas in wanted.items():
        now.pool(role)
        if replicas < 1:
            raise InputError(f"--{role}", replicas, "at least 1 replica")
    changed = tuple(
        ReplicaChange(pool=pool, replicas=wanted[pool.role])
        for pool in now.pools
        if wanted.get(pool.role, pool.replicas) != pool.replicas
    )
    devices = sum(pool.gpus for pool in planned.pools)
    after = sum(pool.slicing.gpus * wanted.get(pool.role, pool.replicas) for pool in now.pools)
    if after > devices:
        raise InputError("scale", f"{after} devices", f"at most the plan's {devices} (plan again)")
    return tuple(sorted(changed, key=lambda change: change.grows))


def scale(state: State, wanted: Mapping[str, int], report: Callable[[str], None]) -> State:
    """
    Scale the pools to *wanted* replicas, one pool after the other, without refusing a request.

    A replica that is removed finishes its requests first. On a cluster that serving started, a
    device that changes pools gets a raylet of its own, labelled for its new pool; elsewhere the
    cluster must have a free node of that role.

    Raises:
        InputError: as `replica_changes`.
        NegativeAnswer: the deployment was substituted, there are several domains, or a foreign
            cluster has no free node.
        TargetFailed: replicas do not start or end in time.
    """
    if is_substituted(state):
        raise NegativeAnswer("the deployment was substituted: it has none of the plan's devices")
    planned, now = read_deployment(Path(state.plan)), read_deployment(Path(state.deployment))
    for change in replica_changes(planned, now, wanted):
        name = _deployment_name(state, change.pool.role)
        if change.grows:
            after = _placed(change, _free(planned, now))
            _ensure_room(state, now, after, report)
        _set_replicas(state, name, change, report)
        if not change.grows:
            after = _remaining(state, change)
            _retire(state, change.pool.role)
        now = replace(
            now, pools=tuple(after if pool.role == after.role else pool for pool in now.pools)
        )
        state = _record(state, planned, now)
    return state


def is_substituted(state: State) -> bool:
    """Return whether `--substitute` made the deployment another one than the plan's."""
    return not all(SCALED in change for change in state.changes)


def _free(planned: Deployment, now: Deployment) -> list[tuple[str, int]]:
    held = {device for pool in now.pools for device in _devices(pool)}
    return [device for pool in planned.pools for device in _devices(pool) if device not in held]


def _devices(pool: Pool) -> list[tuple[str, int]]:
    """Return node and device of every worker of a pool."""
    return [device for place in replica_places(pool) for device in place]


def _placed(change: ReplicaChange, free: list[tuple[str, int]]) -> Pool:
    added = (change.replicas - change.pool.replicas) * change.pool.slicing.gpus
    return _with_places(
        change.pool, change.replicas, [*replica_places(change.pool), tuple(free[:added])]
    )


def _remaining(state: State, change: ReplicaChange) -> Pool:
    """Return the pool with the remaining replicas, which Serve chose, found by node and cores."""
    places = replica_places(change.pool)
    facts = cluster_status(state, facts=True).pool(change.pool.role).facts
    found = [
        sorted(
            (fact["labels"].get(NODE_LABEL), core) for worker in fact["cores"] for core in worker
        )
        for fact in facts
    ]
    stayed = [place for place in places if sorted(place) in found]
    kept = stayed if len(stayed) == change.replicas else places[: change.replicas]
    return _with_places(change.pool, change.replicas, kept)


def _with_places(pool: Pool, replicas: int, places: Sequence[Place]) -> Pool:
    placement = tuple(
        Placement(node=node, gpus=tuple(gpus))
        for place in places
        for node, gpus in _by_node(place).items()
    )
    spares = min(pool.spare_replicas, replicas)
    return replace(pool, replicas=replicas, placement=placement, spare_replicas=spares)


def _by_node(devices: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node, device in devices:
        found.setdefault(node, []).append(device)
    return found


def _ensure_room(state: State, now: Deployment, after: Pool, report: Callable[[str], None]) -> None:
    """Start raylets of the pool's role for the added replicas, if the cluster has no free ones."""
    before = _devices(now.pool(after.role))
    added = [device for device in _devices(after) if device not in before]
    kind = _kind(state)
    if sum(int(free.get(kind, 0)) for _, free in _nodes(state, after.role)) >= len(added):
        return
    cluster_id, token = cluster_id_of(state), token_file(state.address)
    if token is None:
        raise NegativeAnswer(
            f"no free node is labelled {ROLE_LABEL}={after.role}; start one with "
            f"--labels {ROLE_LABEL}={after.role},{NODE_LABEL}={added[0][0]}"
        )
    nodes = [
        ray_node(node, after.role, devices, state.target, moved=True)
        for node, devices in _by_node(added).items()
    ]
    report(f"starting {len(nodes)} raylet(s) for {after.role}")
    join_nodes(nodes, environment(cluster_id, token), address=state.address)


def cluster_id_of(state: State) -> str:
    """Return the mark of the cluster's processes; empty for a foreign cluster."""
    cluster = cluster_at(state.address)
    return state.cluster_id if cluster is None else cluster.cluster_id


def _retire(state: State, role: str) -> None:
    """Stop our raylets that have no replica of *role* left; another pool takes their devices."""
    cluster_id, kind = cluster_id_of(state), _kind(state)
    if not cluster_id:
        return
    for node, free in _nodes(state, role):
        empty = free.get(kind, 0) == node["Resources"].get(kind, 0)
        if empty and "node:__internal_head__" not in node["Resources"]:
            stop(raylet_mark(cluster_id, node["Labels"]), variable=RAYLET)


def _kind(state: State) -> str:
    return "CPU" if state.target == "cpu" else "GPU"


def _nodes(state: State, role: str) -> list[tuple[dict[str, Any], dict[str, float]]]:
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
    state: State, name: str, change: ReplicaChange, report: Callable[[str], None]
) -> None:
    from ray import serve  # noqa: PLC0415  (a second to import)

    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.cluster.serve_compat import deployment_options, set_replicas  # noqa: PLC0415

    with connected(state.address):
        set_replicas(APP, name, change.replicas)
        limit_s = LIMIT_S + deployment_options(APP)[name]["graceful_shutdown_timeout_s"]
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            states = dict(serve.status().applications[APP].deployments[name].replica_states)
            report(f"{change.pool.role}: {states.get('RUNNING', 0)} of {change.replicas} replicas")
            if states == {"RUNNING": change.replicas}:
                return
            time.sleep(0.5)
    raise TargetFailed(f"{name} did not reach {change.replicas} replicas in {limit_s:.0f} s")


def _deployment_name(state: State, role: str) -> str:
    from ray import serve  # noqa: PLC0415

    from serving.cluster.connection import connected  # noqa: PLC0415

    with connected(state.address):
        found = by_role(dict(serve.status().applications[APP].deployments)).get(role, {})
    if len(found) != 1:
        raise NegativeAnswer(
            f"{role} has {len(found)} deployments, one per domain; scale moves replicas inside one "
            "domain only (plan again)"
        )
    return next(iter(found))


def _record(state: State, planned: Deployment, now: Deployment) -> State:
    """Record the deployment as it is now, for `verify` and `status`."""
    write_atomically(Path(state.deployment), to_json(now))
    scaled = tuple(
        f"pools[{pool.role}].replicas: {now.pool(pool.role).replicas} instead of {pool.replicas} "
        f"{SCALED}"
        for pool in planned.pools
        if now.pool(pool.role).replicas != pool.replicas
    )
    state = replace(state, changes=scaled)
    write_state(state)
    return state
