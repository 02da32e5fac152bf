"""The Ray Serve application: endpoint, and the pools of the plan."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.llm import LLMConfig, build_llm_deployment

from serving.admission.controller import GUARD
from serving.api.api_keys import KEYS_FILE
from serving.api.auth import ORIGINS
from serving.cluster.serve_compat import with_version
from serving.deployment.compile import IN_ONE_THREAD
from serving.deployment.import_path import imported
from serving.protocol.endpoint_config import to_plain
from serving.replicas.colocated import MixedServer
from serving.replicas.ingress import Ingress
from serving.replicas.prefill_decode import SplitDecodeServer, SplitPrefillServer
from serving.request.token_limit import MAX_OUTPUT_TOKENS

if TYPE_CHECKING:
    from serving.protocol.app_spec import ServedApp, ServedPool

INGRESS = "Ingress"
INGRESS_REQUESTS = 100_000
"""The front door refuses by what it predicts; Serve's own limit stays out of the way."""


def from_plan(args: dict[str, str]) -> Any:  # noqa: ANN401
    """
    Return the application of a plan on hosts of its own: `import_path` of `serving manifest`.

    *args* as `serving.deployment.import_path` says; raises as it does.
    """
    return build_app(imported(args, os.environ))


def build_app(served: ServedApp, address: tuple[str, int] | None = None) -> Any:  # noqa: ANN401
    """Return the application for `serve.run`; see `serving.replicas.ingress` for *address*."""
    front = to_plain(served.front)
    prefill = {
        pool.domain: _bound(pool, SplitPrefillServer, front) for pool in served.of("prefill")
    }
    servers = {pool.domain: _bound(pool, MixedServer, front) for pool in served.of("mixed")}
    for pool in served.of("decode"):
        servers[pool.domain] = _bound(
            pool,
            SplitDecodeServer,
            front,
            prefill_server=prefill[served.front.pairing[pool.domain][0]],
            prefill_servers=prefill,
            domain=pool.domain,
        )
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=1,
        max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={
            "num_cpus": 0,
            # Where its address is, and where `serving scale` never stops a raylet.
            "resources": {"node:__internal_head__": 0.001},
            "runtime_env": {"env_vars": IN_ONE_THREAD | _handed_on()},
        },
    )
    return ingress.bind(front, servers=servers, prefill=prefill, address=address)


def _handed_on() -> dict[str, str]:
    """Return what the endpoint is told by its environment: where keys lie, never the keys."""
    return {
        name: os.environ[name]
        for name in (KEYS_FILE, ORIGINS, MAX_OUTPUT_TOKENS, GUARD)
        if name in os.environ
    }


def _bound(pool: ServedPool, server: type, front: dict[str, Any], **bound: Any) -> Any:  # noqa: ANN401
    """
    Bind one deployment; Ray gets its own copy of the configuration, for it writes into it.

    Its version is its engine's: another plan over the same engine reaches the running replicas as
    their `user_config`, and only another engine starts new ones.
    """
    config = copy.deepcopy(dict(pool.llm_config))
    config["deployment_config"]["user_config"] = front
    app = build_llm_deployment(
        LLMConfig(**config), name_prefix=pool.prefix, bind_kwargs=bound, deployment_cls=server
    )
    engine = {key: value for key, value in pool.llm_config.items() if key != "deployment_config"}
    digest = hashlib.sha256(json.dumps(engine, sort_keys=True, default=str).encode())
    return with_version(app, digest.hexdigest()[:16])
