"""The endpoint as Ray Serve has it: its health, and its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.api.access_log import access_log
from serving.cluster.ports import free_ports
from serving.protocol.endpoint_config import EndpointConfig, to_plain
from serving.replicas.ingress import Ingress

OURS: Any = Ingress.__wrapped__  # type: ignore[attr-defined]


class Endpoint(OURS):
    """Ours without Ray Serve around it."""

    def __del__(self) -> None:
        """Python's own end: Ray Serve awaits ours before."""


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leave this process's signals and logs alone: it is no worker of Ray."""
    monkeypatch.setattr("serving.replicas.ingress.before_sigterm", lambda _wait: None)
    monkeypatch.setattr("serving.replicas.ingress.serve_logs", lambda: tmp_path)
    kept = [*access_log.handlers]
    yield
    for handler in {*access_log.handlers} - {*kept}:
        access_log.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize("dies", [True, False])
def test_it_is_healthy_as_long_as_it_listens(config: EndpointConfig, *, dies: bool) -> None:
    """A server that has ended is found out, and the port is free after the end."""
    [port] = free_ports(1)

    async def used() -> None:
        address = ("127.0.0.1", port)
        settings = {"config": to_plain(config), "servers": {}, "prefill": {}, "drain_s": 1.0}
        ingress = Endpoint(settings, address=address)
        await ingress.__serve_build_asgi_app__()
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.01)
        writer.close()
        ingress.check_health()
        if dies:
            ingress._server.stop()
            await asyncio.wait({ingress._serving})
            with pytest.raises(RuntimeError, match=str(port)):
                ingress.check_health()
        await OURS.__del__(ingress)

    asyncio.run(asyncio.wait_for(used(), 30))
    socket.create_server(("127.0.0.1", port)).close()
