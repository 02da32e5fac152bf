"""Talking to a Ray cluster from a command that soon ends."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

from sizing.errors import TargetFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S = 5.0
"""How long a head may take to accept a connection."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """
    Be a driver of the cluster for the duration of the block.

    Raises:
        TargetFailed: nobody answers there.
    """
    if not _answers(address):
        raise TargetFailed(f"no Ray cluster at {address}: nobody listens there")
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


def instance_of(address: str) -> str:
    """Return Ray's name of what runs at *address*: another one after a start; raises as above."""
    with connected(address):
        return str(ray.get_runtime_context().get_session_name())


def _answers(address: str) -> bool:
    """Tell whether somebody listens at `host:port`; Ray itself would try again for many minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return True  # another form of an address, that Ray knows
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return True
    except OSError:
        return False
