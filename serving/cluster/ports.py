"""Free ports."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from minicluster.errors import TargetFailed

NIXL_PORT = 20_000
NIXL_PORTS = 2_000
NIXL_PORTS_APART = {"prefill": 0, "decode": NIXL_PORTS}
"""
Offset of each role's side-channel ports from `nixl_port`; each worker of each replica takes the
next one.
"""

LOOPBACK = "127.0.0.1"
"""The address of all processes of a cluster on this machine."""


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Return *count* free ports of *host*."""
    with ExitStack() as held:
        servers = [held.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def free_nixl_port(num_workers: int) -> int:
    """
    Return a first port such that the ports of both pools are free.

    vLLM does not notice a port that is taken: its engine then waits for itself without limit.
    """
    # In random order, because the engines bind their ports only a minute later: another deployment
    # that starts at the same time must not choose the same ones.
    bases = range(NIXL_PORT, NIXL_PORT + NIXL_PORTS - num_workers, num_workers)
    for port in random.sample(bases, k=len(bases)):
        wanted = [
            port + apart + i for apart in NIXL_PORTS_APART.values() for i in range(num_workers)
        ]
        if all(is_free("0.0.0.0", each) for each in wanted):  # noqa: S104  (any address)
            return port
    raise TargetFailed(f"no {num_workers} free ports from {NIXL_PORT} on for NIXL; `serving down`?")


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
