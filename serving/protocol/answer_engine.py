"""An engine as the servers of the pools use it: vLLM, or a simulated one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from serving.protocol.messages import Prefilled, Refusal


class AnswerEngine(Protocol):
    """
    One engine.

    Its requests have attributes `request_id` and `stream`, and are passed on as they are.
    """

    def read(self, kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return the request of *kind* (`chat` or `completions`), or the refusal of the body."""

    async def prompt_tokens(self, request: Any) -> int | None:  # noqa: ANN401
        """Return the tokens of a prompt; `None`: the engine refuses it."""

    def for_decode(self, request: Any, prefilled: Prefilled) -> Any:  # noqa: ANN401
        """Return the request with the place of its KV cache."""

    def answer(self, request: Any) -> AsyncGenerator[Refusal | list[str] | dict[str, Any], None]:  # noqa: ANN401
        """
        Answer; closing the iterator ends the request.

        Yields server-sent events as they come, or the whole answer; a refusal is the last item.
        """

    def first_token_seen(self, request: Any) -> bool:  # noqa: ANN401
        """Return whether a request that is answered in one piece has its first token."""

    def pull_failed(self, request: Any) -> bool:  # noqa: ANN401
        """
        Return whether a request with a first token had its prompt computed here after all.

        Its KV cache was lost on its way.
        """

    async def compute(self, request: Any, *, keep: bool) -> Prefilled | Refusal:  # noqa: ANN401
        """
        Compute the KV cache of a request's prompt, and one token that is dropped.

        Args:
            request: of a prefill engine.
            keep: for another engine to fetch it; else it is dropped.

        Raises:
            EngineFailed: the engine failed.
        """

    def died(self) -> bool:
        """Return whether the engine is lost; it is never restarted."""

    async def kv_is_free(self) -> bool:
        """Return whether no request holds KV cache; drops the prefix cache of earlier ones."""

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> list[list[float]]:
        """Return the steps that ended in an interval, as `EngineStep`s; none of simulated ones."""

    def facts(self) -> dict[str, Any]:
        """Return the settings that a plan decides, asked of the engine."""
