"""Free ports."""

from __future__ import annotations

import random
import socket

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


SERVER_PORTS = range(NIXL_PORT + 2 * NIXL_PORTS, 32_768)
"""
Ports for servers that bind them later: above those of NIXL, below those that Linux gives to
connections and to servers that name none, of which Ray starts dozens meanwhile.
"""


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """
    Return *count* free ports of *host*, for servers that will start in the next minutes.

    Raises:
        OSError: *host* is no address of this machine.
        TargetFailed: there are not so many.
    """
    _bound(host, 0).close()
    ports: list[int] = []
    for port in random.sample(SERVER_PORTS, k=len(SERVER_PORTS)):
        if len(ports) == count:
            return ports
        if is_free(host, port):
            ports.append(port)
    raise TargetFailed(f"no {count} free ports of {host} from {SERVER_PORTS[0]} on")


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
        if all(is_free("0.0.0.0", candidate) for candidate in wanted):  # noqa: S104  (any address)
            return port
    raise TargetFailed(f"no {num_workers} free ports from {NIXL_PORT} on for NIXL; `serving down`?")


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    try:
        _bound(host, port).close()
    except OSError:
        return False
    return True


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
