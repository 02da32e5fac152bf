"""What a server does by its role, whatever its engine: with an engine of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serving.protocol.messages import Prefilled
from serving.replicas import roles
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
        for _ in range(prompts):
            await server.prefill("completions", {"prompt": "x"})
        await server.drain()

    run(leave())
    assert server.answers.looks == looks
