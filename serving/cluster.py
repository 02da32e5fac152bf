"""A Ray cluster on this machine, one raylet for each pool's share of each planned node."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from serving.engine import NIXL_PORT, NIXL_PORTS, NIXL_PORTS_APART
from serving.processes import environment
from serving.reason import first_error
from sizing.errors import TargetFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.served import RayNode

LOOPBACK = "127.0.0.2"
OBJECT_STORE_BYTES = 128 << 20
"""Requests and tokens are small; Ray's default would be 30 % of the memory."""


def new_session() -> Path:
    """Make Ray's directory; its path must be short, for it holds Unix sockets."""
    return Path(mkdtemp(prefix="minicluster-", dir="/tmp"))


def start_nodes(
    nodes: Sequence[RayNode], *, cluster_id: str, session: Path, told: Callable[[str], None]
) -> str:
    """
    Start one raylet a node, the first as the head.

    Returns:
        The cluster's address.

    Raises:
        TargetFailed: Ray did not start; the message is Ray's.
    """
    head, *others = nodes
    port, client_port = free_ports(2)
    address = f"{LOOPBACK}:{port}"
    told(f"starting Ray: {len(nodes)} node(s)")
    _ray_start(
        head,
        cluster_id,
        "--head",
        f"--port={port}",
        f"--ray-client-server-port={client_port}",
        f"--temp-dir={session}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    )
    for node in others:
        _ray_start(node, cluster_id, f"--address={address}")
    return address


def _ray_start(node: RayNode, cluster_id: str, *options: str) -> None:
    """Run `ray start`, which leaves its processes in the background."""
    labels = ",".join(f"{key}={value}" for key, value in node.labels.items())
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        *options,
        f"--node-ip-address={LOOPBACK}",
        f"--num-cpus={len(node.cores) or len(node.gpus)}",
        f"--num-gpus={len(node.gpus)}",
        f"--labels={labels}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]
    env = environment(cluster_id)
    if node.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.gpus))
    done = subprocess.run(  # noqa: S603  (our own interpreter)
        command, env=env, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        said = first_error(done.stdout + done.stderr)
        raise TargetFailed(f"Ray did not start for {node.role} on {node.node}: {said}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def free_nixl_port(num_workers: int) -> int:
    """
    Return a first port from which both pools find theirs free, whoever else is deployed here.

    vLLM does not notice a port that is taken: its engine then waits for itself for ever.
    """
    # In random order: another deployment that starts just now must not choose the same ones, for
    # the engines bind them only a minute later, and wait for ever if they are taken.
    bases = range(NIXL_PORT, NIXL_PORT + NIXL_PORTS - num_workers, num_workers)
    for port in random.sample(bases, k=len(bases)):
        wanted = [
            port + apart + i for apart in NIXL_PORTS_APART.values() for i in range(num_workers)
        ]
        if all(is_free("0.0.0.0", each) for each in wanted):  # noqa: S104  (any address)
            return port
    raise TargetFailed(f"no {num_workers} free ports from {NIXL_PORT} on for NIXL; `serving down`?")


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
