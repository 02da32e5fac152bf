from __future__ import annotations

import subprocess
import sys

LOOK = """
import inspect
from serving import ray_compat
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.llm._internal.common.callbacks.base import CallbackCtx
from ray.serve._private.router import AsyncioRouter, SingletonThreadRouter
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import PDDecodeServer, PDPrefillServer
above = PDDecodeServer.__mro__[PDDecodeServer.__mro__.index(ray_compat.PDOrchestratorMixin) + 1:]
print(
    next(c for c in above if "completions" in vars(c)) is LLMServer,
    hasattr(PDDecodeServer, "_get_connector_backend"),
    hasattr(PDPrefillServer, "prewarm_prefill"),
    inspect.iscoroutinefunction(LLMServer._start_engine),
    CallbackCtx().run_init_node,
    hasattr(LLMConfig, "get_or_create_callback"),
    hasattr(DeploymentHandle, "is_initialized") and hasattr(DeploymentHandle, "_init"),
    "_asyncio_router" in inspect.getsource(SingletonThreadRouter.__init__),
    hasattr(AsyncioRouter, "running_replicas_populated"),
    isinstance(AsyncioRouter.request_router, property),
    list(inspect.signature(ray_compat.broadcast).parameters)[:3],
)
"""


def test_what_ray_does_not_promise_is_there() -> None:
    """Each private name of Ray Serve LLM that we use is there and means what it meant."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    last = done.stdout.splitlines()[-1]
    assert last == f"{'True ' * 10}['handle', 'method_name', 'args']"
