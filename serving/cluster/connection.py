"""Connections to a Ray cluster from a command that ends soon."""

from __future__ import annotations

import logging
import os
import signal
import socket
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import grpc
import ray
from ray._private import auto_init_hook
from ray._private.authentication.authentication_token_setup import AuthenticationTokenLoader, Config
from ray._private.grpc_utils import init_grpc_channel

from minicluster.command import uninterrupted
from minicluster.errors import InputError, TargetFailed
from serving.cluster.local_cluster import token_file
from serving.cluster.loopback import loopback
from serving.cluster.ports import LOOPBACK
from serving.cluster.token import (
    MODE,
    TOKEN,
    TOKEN_PATH,
    refuse_missing_certificates,
    refuse_missing_token,
    use_token,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S = 5.0
"""Longest time for a head to answer."""

FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The first call of every client to a head; it takes no arguments."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """
    Connect to the cluster as a driver for the duration of the block; one inside it shares it.

    A cluster started from this directory has its token there; for any other one the token comes
    from Ray's own places: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.

    Raises:
        InputError: the cluster's token is missing or wrong.
        TargetFailed: no cluster answers there.
    """
    if ray.is_initialized():
        yield
        return
    refuse_missing_certificates(os.environ)
    host, _, port = address.rpartition(":")
    is_host_and_port = "/" not in host and port.isdigit()  # Ray knows other forms, too
    if is_host_and_port:
        _check_listener(address, host.strip("[]"), int(port))
    local = address.startswith("127.")
    with _with_token_of(address), loopback() if local else nullcontext():
        if is_host_and_port:
            _check_token(address)
        try:
            _join(address, LOOPBACK if local else None)
            yield
        finally:
            # A driver that is still connected, because of a second Ctrl-C, would be ended by Ray
            # with exit code 1 as soon as its cluster is stopped, and what is to end would stay.
            with uninterrupted():
                ray.shutdown()


def _is_failure(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def _join(address: str, own_address: str | None) -> None:
    """Become a driver that prints only Ray's errors; raises TargetFailed if there is no cluster."""
    for logger in (logging.getLogger("ray.serve"), logging.getLogger("ray")):
        for log in (logger, *logger.handlers):
            log.addFilter(_is_failure)
    ends = signal.getsignal(signal.SIGTERM)
    # A call of a thread that Ctrl-C left behind would start a cluster of its own after our end.
    auto_init_hook.enable_auto_connect = False
    try:
        ray.init(
            address=address,
            namespace="minicluster",
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=own_address,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TargetFailed(f"no Ray cluster at {address}: {error}") from None
    finally:
        # Ray replaces the handler; SIGTERM is to mean what it meant before.
        signal.signal(signal.SIGTERM, ends)


def instance_of(address: str) -> str:
    """Return Ray's name of the session at *address*, new at each start; raises as `connected`."""
    with connected(address):
        return str(ray.get_runtime_context().get_session_name())


@contextmanager
def _with_token_of(address: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (MODE, TOKEN, TOKEN_PATH)}
    file = token_file(address)
    if file is None:
        os.environ.setdefault(MODE, "token")
    else:
        use_token(os.environ, file)
    try:
        refuse_missing_token(os.environ, address)
        # Ray reads its variables once, at import, and keeps the token.
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check_listener(address: str, host: str, port: int) -> None:
    """Raise if no process listens at *address*; Ray itself would retry for many minutes."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        raise TargetFailed(f"no Ray cluster at {address}: no process listens there") from None


def _check_token(address: str) -> None:
    """Raise if the head refuses the token; Ray would retry for 20 s, and not report the reason."""
    with init_grpc_channel(address) as channel:
        try:
            channel.unary_unary(FIRST_CALL)(b"", timeout=CONNECT_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise InputError(
                    TOKEN_PATH,
                    os.environ.get(TOKEN_PATH),
                    f"the token of the Ray cluster at {address}, which refuses this one",
                ) from None
            raise TargetFailed(f"no Ray cluster at {address}: no answer") from None
