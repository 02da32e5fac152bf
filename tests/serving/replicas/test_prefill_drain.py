"""How a prefill replica leaves: with an engine of the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.serving.forks import Forks

LEAVE = """
import asyncio
from types import SimpleNamespace
from serving.replicas import servers

servers.FETCH_POLL_S = 0.0
here = SimpleNamespace(replica_id=SimpleNamespace(unique_id="p0"))
servers.serve = SimpleNamespace(get_replica_context=lambda: here)


class Engine:
    "Prefills at once; its KV caches are fetched at the third look."

    def __init__(self):
        self.looks, self.ended_at = 0, None
        self._engine_client = self

    async def completions(self, request, _info):
        yield SimpleNamespace(usage=1, metrics=None, kv_transfer_params={})

    async def reset_prefix_cache(self):
        self.looks += 1
        return self.looks == 3

    async def shutdown(self):
        self.ended_at = self.looks


async def leave(prompts, kv_deadline_s):
    server = object.__new__(servers.SplitPrefillServer)
    server.engine, server._kept_until_s, server._kv_deadline_s = Engine(), 0.0, kv_deadline_s
    for _ in range(prompts):
        await server.prefill("completions", None)
    await server.__del__()
    return server.engine.ended_at


for prompts, kv_deadline_s in ((1, 3600.0), (0, 3600.0), (1, 0.0)):
    print(asyncio.run(leave(prompts, kv_deadline_s)))
"""


def test_a_prefill_replica_keeps_its_engine_until_all_is_fetched(forks: Forks) -> None:
    """It leaves at the third look, when all is fetched; at once where nothing can be any more."""
    assert forks.run(LEAVE)[-3:] == ["3", "0", "0"]
