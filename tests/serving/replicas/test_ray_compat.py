"""Servers in a process that has imported Ray Serve and vLLM: private names, and how one drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.serving.forks import Forks

LOOK = """
import inspect
from serving.cluster import serve_compat
from serving.replicas import engine_compat
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.llm._internal.common.callbacks.base import CallbackCtx
from ray.serve._private.router import AsyncioRouter, SingletonThreadRouter
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultPDProtocolMixin
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm.deployment import PDPrefillServer
from ray.serve.llm.openai_api_models import CompletionRequest
from serving.replicas.engine_request import REMOTE_DECODE
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
asked = CompletionRequest(prompt="x", max_tokens=5)
prefill = DefaultPDProtocolMixin().prepare_prefill_request(request=asked, peer=None)
print(
    prefill.kv_transfer_params == REMOTE_DECODE,
    "self._engine_client" in inspect.getsource(VLLMEngine),
    isinstance(AsyncLLM.errored, property),
    "self.external_req_ids" in inspect.getsource(OutputProcessor.__init__),
    "self.is_prefilling" in inspect.getsource(RequestState.__init__),
    hasattr(PDPrefillServer, "prewarm_prefill"),
    hasattr(OpenAIServingChat, "_extract_prompt_len"),
    hasattr(OpenAIServingCompletion, "_extract_prompt_len"),
    hasattr(OpenAIServingChat, "render_chat_request"),
    hasattr(OpenAIServingCompletion, "render_completion_request"),
    "self._oai_serving_chat" in inspect.getsource(VLLMEngine),
    "self._oai_serving_completion" in inspect.getsource(VLLMEngine),
    inspect.iscoroutinefunction(LLMServer._start_engine),
    CallbackCtx().run_init_node,
    hasattr(LLMConfig, "get_or_create_callback"),
    hasattr(DeploymentHandle, "is_initialized") and hasattr(DeploymentHandle, "_init"),
    "_asyncio_router" in inspect.getsource(SingletonThreadRouter.__init__),
    hasattr(AsyncioRouter, "running_replicas_populated"),
    isinstance(AsyncioRouter.request_router, property),
    list(inspect.signature(serve_compat.broadcast).parameters)[:3],
)
"""


def test_what_ray_does_not_promise_is_there(forks: Forks) -> None:
    """Each private name of Ray Serve LLM that we use is there and means what it meant."""
    last = forks.run(LOOK)[-1]
    assert last == f"{'True ' * 19}['handle', 'method_name', 'args']"
