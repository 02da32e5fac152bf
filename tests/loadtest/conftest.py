"""Mock servers, and ports where nothing listens."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from loadtest.selftest.mock_server import MockConfig
from loadtest.selftest.selftest import mock_server
from tests.loadtest.command import ServerStarter

FIRST_PORT, LAST_PORT, PORTS_A_PROCESS = 20_000, 30_000, 50
TAKEN: set[int] = set()


@pytest.fixture
def start_server() -> Iterator[ServerStarter]:
    """Start mock servers with given behaviour, which all end with the test."""
    with ExitStack() as started:

        def start(certificate: str = "", **behaviour: float | str) -> str:
            server = mock_server(MockConfig(**behaviour), certificate=certificate)
            return started.enter_context(server)

        yield start


@pytest.fixture
def free_port() -> int:
    """
    Return a port for a program that has to be told one.

    It lies below those that the kernel gives away by itself, and is another one in each process
    of the tests and each time: nothing takes it between this and that program's start.
    """
    first = FIRST_PORT + os.getpid() * PORTS_A_PROCESS % (LAST_PORT - FIRST_PORT)
    for port in itertools.chain(range(first, LAST_PORT), range(FIRST_PORT, first)):
        if port in TAKEN:
            continue
        TAKEN.add(port)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port left")


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """Return a port on which nothing listens, and nothing can as long as the test runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        yield port
