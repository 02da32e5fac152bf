"""What a server does by its role, whatever its engine: with an engine of the test."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from serving.protocol.messages import Prefilled
from serving.replicas import roles
from serving.replicas.channels import CallListener, Channel
from tests.serving.virtual_time import run

COMPUTED = Prefilled(prompt_tokens=5, kv_transfer_params={}, queue_s=0.0, step_s=0.1)


class Engine:
    """Prefills at once; its KV caches are fetched at the third look."""

    looks = 0

    def read(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        assert kind == "completions"
        return body

    async def compute(self, _request: object, *, keep: bool) -> Prefilled:
        assert keep
        return COMPUTED

    def died(self) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        return {"tp": 1}

    async def kv_is_free(self) -> bool:
        self.looks += 1
        return self.looks == 3


@pytest.mark.parametrize(
    ("prompts", "kv_deadline_s", "looks"), [(1, 3600.0, 3), (0, 3600.0, 0), (1, 0.0, 0)]
)
def test_a_prefill_replica_keeps_its_engine_until_all_is_fetched(
    monkeypatch: pytest.MonkeyPatch, prompts: int, kv_deadline_s: float, looks: int
) -> None:
    """It leaves when all is fetched; at once where nothing can be any more."""
    here = SimpleNamespace(replica_id=SimpleNamespace(unique_id="p0"))
    monkeypatch.setattr(roles, "serve", SimpleNamespace(get_replica_context=lambda: here))
    server: Any = roles.PrefillRole()
    server.answers, server._kv_deadline_s = Engine(), kv_deadline_s

    async def leave() -> None:
        server.listeners = [CallListener({})]
        for _ in range(prompts):
            await server.prefill("completions", {"prompt": "x"})
        await server.drain()

    run(leave())
    assert server.answers.looks == looks


@pytest.mark.parametrize("gang", [None, "g7"])
def test_a_replica_is_called_where_it_says(
    monkeypatch: pytest.MonkeyPatch, gang: str | None
) -> None:
    """It takes the calls of its role, says of which group it is, and drains until they end."""
    group = gang and SimpleNamespace(gang_id=gang)
    replica_id = SimpleNamespace(unique_id="p0")
    here = SimpleNamespace(replica_id=replica_id, gang_context=group)
    monkeypatch.setattr(roles, "serve", SimpleNamespace(get_replica_context=lambda: here))
    monkeypatch.setattr(roles.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    server: Any = roles.PrefillRole()
    server.answers, server._kv_deadline_s = Engine(), 0.0

    async def called() -> Any:  # noqa: ANN401
        await server.begin()
        [place] = await server.channel_places()
        assert place.group == gang
        channel = Channel(place, None)
        await channel.ready()
        asked = {"kind": "completions", "body": {"prompt": "x"}}
        calls = [channel.call("prefill", asked), channel.call("facts", {})]
        try:
            return [await call.result for call in calls]
        finally:
            await server.drain()
            channel.give_up("the test is over")
            server.listeners[0].close()
            server._watch.cancel()
            await asyncio.sleep(0.1)

    prefilled, facts = asyncio.run(called())
    assert (prefilled, facts) == (replace(COMPUTED, replica="p0"), {"tp": 1})
