"""Servers in a process that has imported Ray Serve and vLLM: private names, and how one drains."""

from __future__ import annotations

from tests.serving.forks import Forks

LOOK = """
import inspect
from ray.llm._internal.common.callbacks.base import CallbackCtx
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultPDProtocolMixin
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve._private.router import AsyncioRouter, SingletonThreadRouter
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.serve.llm.openai_api_models import CompletionRequest
from serving.replicas.engine_request import REMOTE_DECODE
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

for owner, names in {
    OpenAIServingChat: ("_extract_prompt_len", "render_chat_request"),
    OpenAIServingCompletion: ("_extract_prompt_len", "render_completion_request"),
    AsyncLLM: ("errored", "reset_prefix_cache"),
    OutputProcessor: ("_update_stats_from_output",),
    Scheduler: ("_update_requests_with_invalid_blocks",),
    LLMServer: ("_start_engine",),
    LLMConfig: ("get_or_create_callback",),
    DeploymentHandle: ("is_initialized", "_init"),
    AsyncioRouter: ("running_replicas_populated", "request_router"),
}.items():
    for name in names:
        assert hasattr(owner, name), (owner, name)
for made, names in {
    VLLMEngine: ("_engine_client", "_oai_serving_chat", "_oai_serving_completion"),
    OutputProcessor.__init__: ("external_req_ids",),
    RequestState.__init__: ("external_req_id", "is_prefilling"),
    SingletonThreadRouter.__init__: ("_asyncio_router",),
}.items():
    for name in names:
        assert f"self.{name}" in inspect.getsource(made), (made, name)
assert CallbackCtx().run_init_node
asked = CompletionRequest(prompt="x", max_tokens=5)
prefill = DefaultPDProtocolMixin().prepare_prefill_request(request=asked, peer=None)
assert prefill.kv_transfer_params == REMOTE_DECODE
"""


def test_what_ray_does_not_promise_is_there(forks: Forks) -> None:
    """Each private name of Ray Serve LLM and vLLM that we use is there and means what it meant."""
    forks.run(LOOK)
