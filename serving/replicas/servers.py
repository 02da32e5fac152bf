"""The servers of the pools with vLLM, alone or as ranks of a group that shares its experts."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import serve
from ray.llm._internal.serve.serving_patterns.data_parallel.dp_server import DPServer
from ray.serve.llm.deployment import LLMServer

from serving.cluster.serve_compat import keep_log_open
from serving.protocol.app_spec import CORES, planned_cores
from serving.replicas.roles import AnswerRole, EngineServer, PrefillRole
from serving.replicas.vllm_answers import VllmAnswers
from serving.replicas.vllm_plugin import REPLICA


class PlannedServer(EngineServer):
    """A vLLM engine on its planned cores."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # noqa: ANN401
        """Take the planned cores, then start the engine."""
        keep_log_open()
        _prepare_cpu_engine()
        os.environ[REPLICA] = str(os.getpid())
        _take_side_channel_port(llm_config)
        self.answers = answers = VllmAnswers(self)
        await super().__init__(llm_config, **kwargs)  # type: ignore[call-arg, misc]
        answers.started()
        await self.begin()

    async def _start_engine(self) -> None:
        """
        Start the engine, and nothing else.

        Ray would also start an agent that reports usage and a task that downloads model files: 8 s
        and 0.6 GB each, because each imports the engine again.
        """
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            callback = self._llm_config.get_or_create_callback()  # type: ignore[attr-defined]
            callback.ctx.run_init_node = False
        await self.engine.start()  # type: ignore[attr-defined]

    async def __del__(self) -> None:
        """Drain; Ray Serve awaits this once a replica that ends has no requests of its own."""
        await self.drain()
        await super().__del__()  # type: ignore[misc]


class PrefillServer(PlannedServer, PrefillRole, LLMServer):  # type: ignore[misc]
    """A prefill engine."""


class AnswerServer(PlannedServer, AnswerRole, LLMServer):  # type: ignore[misc]
    """A decode engine, or the mixed engine of an aggregated plan."""


class GroupedPrefillServer(PrefillServer, DPServer):  # type: ignore[misc]
    """
    A prefill engine that is a rank of a data-parallel group: one copy of attention.

    Ray Serve starts the ranks of a group together, and all of them again when one dies.
    """


class GroupedAnswerServer(AnswerServer, DPServer):  # type: ignore[misc]
    """An engine that answers and is a rank of a data-parallel group."""


def _take_side_channel_port(llm_config: Any) -> None:  # noqa: ANN401
    """
    Give a rank of a group a NIXL port that no other engine of its deployment has.

    Ray counts ports from the rank in the group, which is the same in every group, and vLLM adds
    that rank once more; a port in the environment is left alone by Ray.
    """
    context = serve.get_replica_context()
    base = llm_config.experimental_configs.get("NIXL_SIDE_CHANNEL_PORT_BASE")
    if base is None or context.gang_context is None:
        return
    width = llm_config.engine_kwargs["tensor_parallel_size"]
    port = base + context.rank.rank * width - context.gang_context.rank
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)


def _prepare_cpu_engine() -> None:
    """
    Set the planned cores for vLLM, which this process starts, and disable torch.compile.

    vLLM compiles token sampling and the ranking of log-probabilities at the first request that
    uses them, whatever `enforce_eager` says: seconds on an idle machine, a minute on a busy one,
    for microseconds, while all requests wait.
    """
    if os.environ.get(CORES):
        rank = serve.get_replica_context().rank.rank
        labels = ray.get_runtime_context().get_node_labels()
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = planned_cores(os.environ[CORES], rank, labels)
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
