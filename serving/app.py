"""The Ray Serve application: endpoint, decode pool, prefill pool."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.llm import LLMConfig, build_llm_deployment

from serving.ingress import Ingress
from serving.split import SplitDecodeServer, SplitPrefillServer

if TYPE_CHECKING:
    from serving.compile import ServedApp, ServedPool


def build_app(served: ServedApp) -> Any:  # noqa: ANN401
    """Return the application that `serve.run` deploys."""
    prefill = build_llm_deployment(
        _llm_config(served.prefill), name_prefix="Prefill:", deployment_cls=SplitPrefillServer
    )
    decode = build_llm_deployment(
        _llm_config(served.decode),
        name_prefix="Decode:",
        bind_kwargs={"prefill_server": prefill},
        deployment_cls=SplitDecodeServer,
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(served.model_id, served.max_model_len, prefill=prefill, decode=decode)


def _llm_config(pool: ServedPool) -> LLMConfig:
    """Give Ray its own copy: it writes into what it is given."""
    return LLMConfig(**copy.deepcopy(dict(pool.llm_config)))
