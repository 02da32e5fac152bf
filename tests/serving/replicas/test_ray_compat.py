"""Servers in a process that has imported Ray Serve and vLLM: private names, and how one drains."""

from __future__ import annotations

from pathlib import Path

from minicluster.plan import to_json
from tests.serving.forks import Forks
from tests.serving.plans import make_deployment, make_plan, make_pool, places

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
from serving.replicas.vllm import REMOTE_DECODE
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


GANGS = """
import sys
from pathlib import Path
from ray.serve._private.build_app import build_app as build
from serving.replicas.app import build_app, from_plan
from minicluster.plan import read_plan
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget

plan = read_plan(Path(sys.argv[1]))
simulated = compile_app(plan.deployment, DeployTarget(kind="simulated"), plan=plan)
for app in (from_plan({"plan": sys.argv[1], "access": "open"}), build_app(simulated)):
    for deployment in build(app, name="x").deployments:
        options = deployment._deployment_config
        gang = options.gang_scheduling_config
        policy = gang and gang.runtime_failure_policy.value
        print(deployment.name, options.num_replicas, gang and gang.gang_size, policy)
"""


def test_ranks_of_a_group_are_a_gang(forks: Forks, moe_model: Path, tmp_path: Path) -> None:
    """Ray Serve restarts a gang of two ranks as a whole; of simulated ones each process has two."""
    cores = places(("laptop", (0, 1)), ("laptop", (2, 3)))
    decode = make_pool("decode", replicas=2, dp=2, ep=2, placement=cores)
    file = tmp_path / "plan.json"
    file.write_text(to_json(make_plan(make_deployment(moe_model, decode=decode))))
    said = forks.run(GANGS, str(file))
    alone = [f"{name} 1 None None" for name in ("Gate", "Ingress", "Prefill:demo")]
    assert sorted(said[:4]) == ["Decode:demo 4 2 RESTART_GANG", *alone]
    assert sorted(said[4:]) == ["Decode:demo 2 None None", *alone]
