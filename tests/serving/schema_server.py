"""
The endpoint over pools that check requests with vLLM's own schema and answer without an engine.

It runs in a process of its own (`forks`), because importing vLLM takes seconds and warns.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import uvicorn
from fake_servers import FakeServers

from minicluster.plan import read_plan
from serving.deployment.compile import endpoint_config
from serving.protocol.messages import Refusal
from serving.replicas.vllm import engine_request
from tests.serving.configs import ONGOING
from tests.serving.endpoint_app import endpoint_app

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


class SchemaServers(FakeServers):
    """Refuses what vLLM's request classes refuse."""

    async def items(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[Any] | None = None
    ) -> AsyncGenerator[Any]:
        request = engine_request(kind, body)
        if isinstance(request, Refusal):
            yield request
            return
        pickle.dumps(body)  # as it goes to another process
        async for item in super().items(domain, kind, body, tried):
            yield item


def main(plan: Path, port: int) -> None:
    given = read_plan(plan)
    nodes = {placement.node: "d0" for pool in given.pools for placement in pool.placement}
    config = endpoint_config(given.deployment, domains=nodes, ongoing=ONGOING, plan=given)
    app = endpoint_app(config, SchemaServers(), {})
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
