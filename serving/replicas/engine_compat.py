"""
What we take from vLLM, and from Ray's server of an engine, that they do not promise to keep.

Ray 2.60.0, vLLM 0.29.0; tests/serving/test_ray_compat.py says which name is gone after an upgrade.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMClientError


def skip_download(llm_config: Any) -> None:  # noqa: ANN401
    """Have no task run on each node that downloads the model."""
    llm_config.get_or_create_callback().ctx.run_init_node = False


def engine_is_dead(engine: Any) -> bool:  # noqa: ANN401
    """Tell whether a replica's engine has lost its processes; it never gets them back."""
    return bool(engine._engine_client.errored)  # noqa: SLF001


async def prompt_tokens(engine: Any, kind: str, request: Any) -> int | None:  # noqa: ANN401
    """
    Count the tokens of a prompt as the engine will; `None` where it takes no such prompt.

    By what renders prompts for answers: Ray's `tokenize` looks for a server that vLLM 0.29 has not.
    """
    if isinstance(getattr(request, "prompt", None), list):
        return len(request.prompt)
    try:
        if kind == "chat":
            server = engine._oai_serving_chat  # noqa: SLF001
            rendered = await server.render_chat_request(request)
            inputs = rendered[1] if isinstance(rendered, tuple) else None
        else:
            server = engine._oai_serving_completion  # noqa: SLF001
            rendered = await server.render_completion_request(request)
            inputs = rendered if isinstance(rendered, list) else None
    except (ValueError, VLLMClientError):
        inputs = None  # whoever answers says why
    return inputs and sum(server._extract_prompt_len(each) for each in inputs)  # noqa: SLF001


REQUEST_IDS = {"chat": "chatcmpl-{}", "completions": "cmpl-{}-0"}
"""What vLLM makes of a request's id; of several prompts the first counts."""


def first_token_seen(engine: Any, kind: str, request_id: str) -> bool:  # noqa: ANN401
    """Tell whether a request that is answered as a whole has its first token."""
    processor = engine._engine_client.output_processor  # noqa: SLF001
    names = processor.external_req_ids.get(REQUEST_IDS[kind].format(request_id), ())
    states = [processor.request_states.get(name) for name in names]
    return any(state is not None and not state.is_prefilling for state in states)
