"""Ports that nobody listens on."""

from __future__ import annotations

import random
import socket

from minicluster.errors import TargetFailed

NIXL_PORT = 20_000
NIXL_PORTS = 2_000
NIXL_PORTS_APART = {"prefill": 0, "decode": NIXL_PORTS}
"""
Side-channel ports of each role from `nixl_port` on; every worker of every replica takes the next.
"""

LOOPBACK = "127.0.0.1"
"""Where all processes of a cluster on this machine listen."""


def free_port(host: str) -> int:
    """Return a port of *host* that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


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
