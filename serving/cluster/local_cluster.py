"""A labelled cluster of several raylets on this machine that outlives its deployments."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from minicluster.command import uninterrupted
from minicluster.errors import InputError, NegativeAnswer, TargetFailed
from serving.cluster.processes import cluster_processes, stop
from serving.cluster.raylets import session_path, start_nodes
from serving.cluster.state import (
    HOME,
    TOKEN,
    UNFINISHED,
    read_record,
    read_state,
    remove_session,
    write_record,
)
from serving.cluster.token import refuse_missing_certificates
from serving.protocol.app_spec import RayNode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

CLUSTER = HOME / "cluster.json"
CLUSTER_TOKEN = HOME / "cluster-token"
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """
    One cluster.

    Attributes:
        cluster_id: the value of `MARK` in its processes.
        address: of its head.
    """

    cluster_id: str
    address: str
    started: str
    nodes: tuple[RayNode, ...]

    @property
    def session(self) -> Path:
        """Ray's directory, logs included."""
        return session_path(self.cluster_id)


def numbered_nodes(count: int, cpus: int) -> tuple[RayNode, ...]:
    """Return the raylets of *count* nodes, each with *cpus* for either role."""
    return tuple(
        RayNode(node=f"node-{number}", role=role, cores=tuple(range(cpus)), gpus=())
        for number in range(count)
        for role in ROLES
    )


def cluster_up(nodes: Sequence[RayNode], report: Callable[[str], None]) -> LocalCluster:
    """
    Start a cluster and record it; a failure leaves nothing behind.

    Raises:
        InputError: there is one already, or certificates for encryption are missing.
        TargetFailed: Ray did not start.
    """
    running = read_cluster()
    if running is not None:
        raise InputError("cluster", running.address, "none yet", "`serving cluster down`")
    refuse_missing_certificates(os.environ)
    cluster = LocalCluster(
        cluster_id=secrets.token_hex(8),
        address="",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        nodes=tuple(nodes),
    )
    try:
        write_record(CLUSTER, cluster)
        address = start_nodes(
            nodes,
            cluster_id=cluster.cluster_id,
            token=CLUSTER_TOKEN,
            report=report,
        )
        cluster = replace(cluster, address=address)
        write_record(CLUSTER, cluster)
    except BaseException:
        with uninterrupted():
            report("stopping what was started")
            _remove(cluster)
        raise
    return cluster


def cluster_down() -> bool:
    """
    Stop the cluster; returns `False` if there is none.

    Raises:
        InputError: something is deployed on it.
        TargetFailed: a process does not end.
    """
    cluster = read_cluster()
    if cluster is None:
        return False
    state = read_state()
    if state is not None and state.address == cluster.address:
        raise InputError("cluster", state.base_url, "nothing deployed on it", "`serving down`")
    _remove(cluster)
    return True


def current_cluster() -> LocalCluster:
    """
    Return the cluster that was started from this directory.

    Raises:
        NegativeAnswer: none was.
        TargetFailed: its processes are gone, or Ray is not up.
    """
    cluster = read_cluster()
    if cluster is None:
        raise NegativeAnswer("no cluster was started from this directory (`serving cluster up`)")
    if not cluster_processes(cluster.cluster_id):
        raise TargetFailed(
            f"the cluster started {cluster.started} is gone; `serving cluster down` clears it"
        )
    if not cluster.address:
        raise TargetFailed(
            f"`serving cluster up`, begun {cluster.started}, {UNFINISHED} (`serving cluster down`"
            " clears what is left)"
        )
    return cluster


def read_cluster() -> LocalCluster | None:
    """Return the recorded cluster, if any."""
    return read_record(CLUSTER, LocalCluster, "`serving cluster up`", f"remove {CLUSTER}")


def cluster_at(address: str) -> LocalCluster | None:
    """Return the recorded cluster, if it is the one at *address*."""
    cluster = read_cluster()
    return cluster if cluster is not None and cluster.address == address else None


def token_file(address: str) -> Path | None:
    """Return the token file of the cluster at *address*, if it was started from this directory."""
    state = read_state()
    if state is not None and state.cluster_id and state.address == address:
        return TOKEN
    return None if cluster_at(address) is None else CLUSTER_TOKEN


def _remove(cluster: LocalCluster) -> None:
    stop(cluster.cluster_id)
    remove_session(cluster.session)
    CLUSTER_TOKEN.unlink(missing_ok=True)
    CLUSTER.unlink(missing_ok=True)
