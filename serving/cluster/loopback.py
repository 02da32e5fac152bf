"""
Ray on loopback: every port that Ray binds is reachable from this machine only.

Ray replaces 127.0.0.1 by the host's public address and listens on all interfaces, for any other
address too. It keeps to loopback only where it takes 127.0.0.1 for the host's address, as on a
Mac; on Linux there is no option for it (ray 2.60.0). A `ray start` on loopback:

    python -m serving.cluster.loopback start --node-ip-address=127.0.0.1 …
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ray._private import services

from serving.cluster.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def loopback() -> Iterator[None]:
    """Make Ray take 127.0.0.1 for this host's address, for the duration of the block."""
    before = services.get_node_ip_address
    services.get_node_ip_address = lambda _address=None: LOOPBACK
    try:
        yield
    finally:
        services.get_node_ip_address = before


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with loopback():
        main()
