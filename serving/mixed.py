"""The server of an aggregated plan: one engine does prefill and decode, no KV cache moves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.openai_api_models import CompletionRequest

from serving.front import front_from
from serving.phases import Phases
from serving.split import Planned, _refusal_of, _request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from serving.requests import Refusal


class MixedServer(Planned, LLMServer):  # type: ignore[misc]
    """An engine on its planned cores that answers by itself."""

    async def __init__(self, llm_config: Any, *, front: dict[str, Any], **kwargs: Any) -> None:  # type: ignore[misc]  # noqa: ANN401
        """Keep what the plan says: see `serving.front`."""
        self._front = front_from(front)
        await super().__init__(llm_config, **kwargs)

    async def answer(
        self, kind: str, body: dict[str, Any]
    ) -> AsyncIterator[Refusal | Phases | list[str] | dict[str, Any]]:
        """Prefill and decode here; yields what `SplitDecodeServer.answer` yields."""
        request = _request(kind, body)
        if not hasattr(request, "model_copy"):
            yield request
            return
        started = time.perf_counter()
        stream = await getattr(super(), kind)(request)
        item = await anext(stream)
        if not isinstance(item, list | str) and not hasattr(item, "usage"):
            yield _refusal_of(item)
            return
        yield Phases(prefill_s=time.perf_counter() - started, handoff_s=0.0)
        yield item if isinstance(item, list) else item.model_dump()
        async for events in stream:
            yield events

    async def probe(self, prompts: list[list[int]]) -> list[Phases]:
        """Run each prompt here, one after the other."""
        phases = []
        for prompt in prompts:
            request = CompletionRequest(
                model=self._llm_config.model_id, prompt=prompt, max_tokens=2
            )
            started = time.perf_counter()
            answer = await anext(aiter(self.engine.completions(request, None)))
            if not hasattr(answer, "usage"):
                raise RuntimeError(str(answer))
            phases.append(Phases(prefill_s=time.perf_counter() - started, handoff_s=0.0))
        return phases
