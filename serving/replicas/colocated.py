"""The server of an aggregated plan: one engine does prefill and decode, no KV cache moves."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.openai_api_models import CompletionRequest

from serving.protocol.endpoint_config import front_from
from serving.protocol.phases import RequestPhases
from serving.protocol.request_policy import order_of
from serving.replicas.generation import Answering
from serving.replicas.prefill_decode import Planned


class MixedServer(Planned, Answering, LLMServer):  # type: ignore[misc]
    """An engine on its planned cores that answers by itself."""

    _reach = None

    def reconfigure(self, front: dict[str, Any]) -> None:
        """Take the deadlines from the plan."""
        self._order = order_of(front_from(front))

    async def probe(self, prompts: list[list[int]]) -> list[RequestPhases]:
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
            phases.append(RequestPhases(prefill_s=time.perf_counter() - started, handoff_s=0.0))
        return phases
