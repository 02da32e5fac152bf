"""
Everything we take from Ray Serve LLM that it does not promise to keep.

Ray 2.60.0; tests/serving/test_ray_compat.py says which name is gone after an upgrade.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDOrchestratorMixin
from ray.llm._internal.serve.utils.broadcast import broadcast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ray.serve.llm.deployment import PDDecodeServer

__all__ = ["broadcast", "connector_backend", "engine_stream", "live_replicas", "skip_download"]


def connector_backend(server: PDDecodeServer) -> Any:  # noqa: ANN401
    """Return what shapes requests for the KV connector."""
    return server._get_connector_backend()  # noqa: SLF001


async def engine_stream(
    server: PDDecodeServer,
    method: str,
    request: Any,  # noqa: ANN401
) -> AsyncIterator[Any]:
    """Run *request* on the server's own engine, past the orchestration of `PDDecodeServer`."""
    run = getattr(super(PDOrchestratorMixin, server), method)
    stream: AsyncIterator[Any] = await run(request)
    return stream


def skip_download(llm_config: Any) -> None:  # noqa: ANN401
    """Have no task run on each node that downloads the model."""
    llm_config.get_or_create_callback().ctx.run_init_node = False


def live_replicas(handle: Any) -> int | None:  # noqa: ANN401
    """
    Return how many replicas *handle* can call at this moment; `None`: it does not know yet.

    It learns from the controller, and at once from a call that finds a replica dead.
    """
    if not handle.is_initialized:
        handle._init()  # noqa: SLF001
    router = handle._router._asyncio_router  # noqa: SLF001
    if not router.running_replicas_populated() or router.request_router is None:
        return None
    return len(router.request_router.curr_replicas)
