"""vLLM behind Ray's server, as `serving.protocol.answer_engine.AnswerEngine`."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ray.serve.llm.openai_api_models import ChatCompletionRequest
from vllm.v1.engine.exceptions import EngineDeadError

from serving.protocol.messages import EngineFailed, Prefilled
from serving.replicas.engine_compat import (
    block_size,
    engine_facts,
    engine_is_dead,
    first_token_seen,
    note_computed_tokens,
    prompt_tokens,
    request_name,
)
from serving.replicas.engine_request import engine_request, for_decode, for_prefill, refusal_in
from serving.request.prefill import ENGINE_DIED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from serving.protocol.messages import Refusal


class VllmAnswers:
    """Ray's server of a vLLM engine; requests are vLLM's."""

    def __init__(self, server: Any) -> None:  # noqa: ANN401
        """Take an `LLMServer`, whose engine may start later."""
        self._server = server
        self._computed_tokens: dict[str, int] = {}
        self._block_tokens = 0

    def started(self) -> None:
        """Take the engine once it has started."""
        note_computed_tokens(self._server.engine, self._computed_tokens)
        self._block_tokens = block_size(self._server.engine)

    def read(self, kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        """See `AnswerEngine`."""
        return engine_request(kind, body)

    async def prompt_tokens(self, request: Any) -> int | None:  # noqa: ANN401
        """See `AnswerEngine`."""
        return await prompt_tokens(self._server.engine, _kind(request), request)

    def for_decode(self, request: Any, prefilled: Prefilled) -> Any:  # noqa: ANN401
        """See `AnswerEngine`."""
        return for_decode(request, prefilled)

    async def answer(
        self,
        request: Any,  # noqa: ANN401
    ) -> AsyncGenerator[Refusal | list[str] | dict[str, Any], None]:
        """See `AnswerEngine`; raises what vLLM raises."""
        name = request_name(_kind(request), request.request_id)
        self._computed_tokens[name] = 0
        async with aclosing(self._stream(request)) as items:
            try:
                async for item in items:
                    refusal = refusal_in(item)
                    if refusal is not None:
                        yield refusal
                        return
                    yield [item] if isinstance(item, str) else item.model_dump()
            except EngineDeadError:
                yield ENGINE_DIED
            finally:
                del self._computed_tokens[name]

    def first_token_seen(self, request: Any) -> bool:  # noqa: ANN401
        """See `AnswerEngine`."""
        return first_token_seen(self._server.engine, _kind(request), request.request_id)

    def pull_failed(self, request: Any) -> bool:  # noqa: ANN401
        """See `AnswerEngine`."""
        name = request_name(_kind(request), request.request_id)
        # Decode computes the end of every prompt that it fetches, which may be a whole block.
        return self._computed_tokens.get(name, 0) > self._block_tokens

    async def compute(self, request: Any, *, keep: bool) -> Prefilled | Refusal:  # noqa: ANN401
        """See `AnswerEngine`; raises no exception of vLLM's."""
        request = for_prefill(request, keep=keep)
        async with aclosing(self._stream(request)) as items:
            try:
                answer = await anext(items)
            except Exception as error:
                raise EngineFailed(repr(error)) from error
        refusal = refusal_in(answer)
        if refusal is not None:
            return refusal
        timed = answer.metrics
        return Prefilled(
            prompt_tokens=answer.usage.prompt_tokens,
            kv_transfer_params=answer.kv_transfer_params or {},
            queue_s=(timed.queue_time_ms or 0.0) / 1e3 if timed else 0.0,
            step_s=(timed.time_to_first_token_ms or 0.0) / 1e3 if timed else 0.0,
        )

    def died(self) -> bool:
        """See `AnswerEngine`."""
        return engine_is_dead(self._server.engine)

    async def kv_is_free(self) -> bool:
        """See `AnswerEngine`."""
        return bool(await self._server.engine._engine_client.reset_prefix_cache())  # noqa: SLF001

    def facts(self) -> dict[str, Any]:
        """See `AnswerEngine`."""
        return engine_facts(self._server)

    def _stream(self, request: Any) -> Any:  # noqa: ANN401
        return getattr(self._server.engine, _kind(request))(request, None)


def _kind(request: Any) -> str:  # noqa: ANN401
    return "chat" if isinstance(request, ChatCompletionRequest) else "completions"
