"""A Ray cluster on this machine: one raylet for each pool's devices on each planned node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import InputError, TargetFailed, unwritable
from minicluster.plan import NODE_LABEL, ROLE_LABEL
from serving.cluster.logs import first_error
from serving.cluster.ports import LOOPBACK, free_ports
from serving.cluster.processes import MARK, RAYLET, environment
from serving.cluster.state import RAY
from serving.cluster.token import write_token
from serving.protocol.app_spec import DEVICES_LABEL, GENERATION_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from serving.protocol.app_spec import RayNode

LABELS = (ROLE_LABEL, NODE_LABEL, DEVICES_LABEL, GENERATION_LABEL)
OBJECT_STORE_BYTES = 128 << 20
"""Size of the object store: requests and tokens are small. Ray's default is 30 % of the memory."""


def session_path(cluster_id: str) -> Path:
    """Return where Ray keeps its files; the path must be short, because it holds Unix sockets."""
    return Path("/tmp") / f"minicluster-{cluster_id[:8]}" / RAY  # noqa: S108  (made by its owner)


def start_nodes(
    nodes: Sequence[RayNode],
    *,
    cluster_id: str,
    token: Path,
    report: Callable[[str], None],
) -> str:
    """
    Start one raylet per node, the first as the head; return the cluster's address.

    Their token is written to *token*, in a new directory that only we may enter.

    Raises:
        InputError: the directory or the token cannot be written.
        TargetFailed: Ray did not start; with Ray's message.
    """
    head, *others = nodes
    port, client_port = free_ports(2)
    address = f"{LOOPBACK}:{port}"
    report(f"starting Ray: {len(nodes)} node(s)")
    session = session_path(cluster_id)
    try:
        session.parent.mkdir(mode=0o700)
    except OSError as error:
        raise InputError(str(session.parent), unwritable(error), "a folder that is new") from None
    write_token(token)
    env = environment(cluster_id, token)
    _ray_start(
        head,
        env,
        "--head",
        f"--port={port}",
        f"--ray-client-server-port={client_port}",
        f"--temp-dir={session}",
        "--no-monitor",  # the autoscaler's: the nodes are the plan's
        "--include-dashboard=false",
        "--disable-usage-stats",
    )
    join_nodes(others, env, address=address)
    return address


def join_nodes(nodes: Sequence[RayNode], env: Mapping[str, str], *, address: str) -> None:
    """Start one raylet per node in a running cluster; raises as `start_nodes`."""
    for node in nodes:
        _ray_start(node, env, f"--address={address}")


def raylet_mark(cluster_id: str, labels: Mapping[str, str]) -> str:
    """Return the mark of one raylet's processes."""
    return "-".join([cluster_id, *(labels[name] for name in LABELS if name in labels)])


def ray_options(node: RayNode) -> list[str]:
    """Return the options of `ray start` for a node, on this or any other host."""
    labels = ",".join(f"{key}={value}" for key, value in node.labels.items())
    return [
        f"--num-cpus={len(node.cores) or len(node.gpus)}",
        f"--num-gpus={len(node.gpus)}",
        f"--labels={labels}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]


def ray_lines(nodes: Sequence[RayNode], head: str, shared: str) -> Iterator[str]:
    """
    Yield the commands for each host of a plan; the first host is the head, at *head*.

    *shared* are environment variables of every process of the cluster.
    """
    for number, node in enumerate(nodes):
        join = f"--head --port={head.rpartition(':')[2]}" if number == 0 else f"--address={head}"
        device = ",".join(map(str, node.gpus))
        visible = f"CUDA_VISIBLE_DEVICES={device} " if node.gpus else ""
        yield f"# on the host that is {node.node}{', the head' if number == 0 else ''}"
        options = " ".join(ray_options(node))
        yield f"{visible}{shared} RAY_worker_niceness=0 ray start {join} {options}"


def _ray_start(node: RayNode, env: Mapping[str, str], *options: str) -> None:
    command = [
        sys.executable,
        "-m",
        "serving.cluster.loopback",
        "start",
        *options,
        "--include-log-monitor=false",  # it sends logs to drivers: `serving logs` reads the files
        f"--node-ip-address={LOOPBACK}",
        *ray_options(node),
    ]
    env = {**env, RAYLET: raylet_mark(env[MARK], node.labels)}
    if node.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.gpus))
    done = subprocess.run(  # noqa: S603  (our own interpreter)
        command, env=env, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        error = first_error(done.stdout + done.stderr)
        raise TargetFailed(f"Ray did not start for {node.role} on {node.node}: {error}")
