"""Talking to a Ray cluster from a command that soon ends."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

from sizing.errors import TargetFailed

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def connected(address: str) -> Iterator[None]:
    """
    Be a driver of the cluster for the duration of the block.

    Raises:
        TargetFailed: nobody answers there.
    """
    local = address.startswith("127.")
    if local:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # as serving.processes starts it
    try:
        ray.init(
            address=address,
            namespace="minicluster",
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.2" if local else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TargetFailed(f"no Ray cluster at {address}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()
