"""
Everything we take from Ray Serve LLM and vLLM that they do not promise to keep.

Ray 2.60.0, vLLM 0.29.0; tests/serving/test_ray_compat.py says which name is gone after an upgrade.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.utils.broadcast import broadcast

__all__ = ["broadcast", "engine_is_dead", "first_token_seen", "skip_download"]


def skip_download(llm_config: Any) -> None:  # noqa: ANN401
    """Have no task run on each node that downloads the model."""
    llm_config.get_or_create_callback().ctx.run_init_node = False


def engine_is_dead(engine: Any) -> bool:  # noqa: ANN401
    """Tell whether a replica's engine has lost its processes; it never gets them back."""
    return bool(engine._engine_client.errored)  # noqa: SLF001


REQUEST_IDS = {"chat": "chatcmpl-{}", "completions": "cmpl-{}-0"}
"""What vLLM makes of a request's id; of several prompts the first counts."""


def first_token_seen(engine: Any, kind: str, request_id: str) -> bool:  # noqa: ANN401
    """Tell whether a request that is answered as a whole has its first token."""
    processor = engine._engine_client.output_processor  # noqa: SLF001
    names = processor.external_req_ids.get(REQUEST_IDS[kind].format(request_id), ())
    states = [processor.request_states.get(name) for name in names]
    return any(state is not None and not state.is_prefilling for state in states)
