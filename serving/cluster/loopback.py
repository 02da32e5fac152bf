"""
Ray on this machine alone: every port that Ray chooses an address for listens on loopback.

Ray takes 127.0.0.1 for "this host, as others reach it", and listens on all interfaces; of any
other address it does the latter too. Only where it believes 127.0.0.1 to be the host's address it
keeps to loopback (what it does on a Mac; on Linux no option says so: ray 2.60.0).

    python -m serving.cluster.loopback start --node-ip-address=127.0.0.1 …    is such a `ray start`
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
    """Have Ray believe that this host's address is 127.0.0.1, for the duration of the block."""
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
