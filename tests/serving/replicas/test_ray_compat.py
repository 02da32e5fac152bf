"""Servers in a process that has imported Ray Serve and vLLM: private names, and how one drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
from serving.cluster import serve_compat
from serving.replicas.engine_request import REMOTE_DECODE
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

for owner, names in {
    OpenAIServingChat: ("_extract_prompt_len", "render_chat_request"),
    OpenAIServingCompletion: ("_extract_prompt_len", "render_completion_request"),
    AsyncLLM: ("errored", "reset_prefix_cache"),
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
    RequestState.__init__: ("is_prefilling",),
    SingletonThreadRouter.__init__: ("_asyncio_router",),
}.items():
    for name in names:
        assert f"self.{name}" in inspect.getsource(made), (made, name)
assert CallbackCtx().run_init_node
assert list(inspect.signature(serve_compat.broadcast).parameters)[:3] == [
    "handle", "method_name", "args"
]
asked = CompletionRequest(prompt="x", max_tokens=5)
prefill = DefaultPDProtocolMixin().prepare_prefill_request(request=asked, peer=None)
assert prefill.kv_transfer_params == REMOTE_DECODE
"""


def test_what_ray_does_not_promise_is_there(forks: Forks) -> None:
    """Each private name of Ray Serve LLM and vLLM that we use is there and means what it meant."""
    forks.run(LOOK)


LEAVE = """
import asyncio
from types import SimpleNamespace
from serving.replicas import servers

servers.FETCH_POLL_S = 0.0
here = SimpleNamespace(replica_id=SimpleNamespace(unique_id="p0"))
servers.serve = SimpleNamespace(get_replica_context=lambda: here)


class Engine:
    "Prefills at once; its KV caches are fetched at the third look."

    def __init__(self):
        self.looks, self.ended_at = 0, None
        self._engine_client = self

    async def completions(self, request, _info):
        yield SimpleNamespace(usage=1, metrics=None, kv_transfer_params={})

    async def reset_prefix_cache(self):
        self.looks += 1
        return self.looks == 3

    async def shutdown(self):
        self.ended_at = self.looks


async def leave(prompts, kv_deadline_s):
    server = object.__new__(servers.SplitPrefillServer)
    server.engine, server._kept_until_s, server._kv_deadline_s = Engine(), 0.0, kv_deadline_s
    for _ in range(prompts):
        await server.prefill("completions", None)
    await server.__del__()
    return server.engine.ended_at


for prompts, kv_deadline_s in ((1, 3600.0), (0, 3600.0), (1, 0.0)):
    print(asyncio.run(leave(prompts, kv_deadline_s)))
"""


def test_a_prefill_replica_keeps_its_engine_until_all_is_fetched(forks: Forks) -> None:
    """It leaves at the third look, when all is fetched; at once where nothing can be any more."""
    assert forks.run(LEAVE)[-3:] == ["3", "0", "0"]
