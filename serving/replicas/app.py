"""The Ray Serve application: the endpoint and the pools of the plan."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.llm import LLMConfig, build_llm_deployment

from serving.admission.controller import ADMISSION, FORMER_NAME
from serving.api.auth import KEYS_FILE, ORIGINS
from serving.cluster.serve_compat import with_version
from serving.deployment.compile import IN_ONE_THREAD
from serving.deployment.manifest import compile_from_args
from serving.protocol.endpoint_config import to_plain
from serving.replicas.ingress import Ingress
from serving.replicas.servers import MixedServer, SplitDecodeServer, SplitPrefillServer
from serving.request.length import MAX_OUTPUT_TOKENS

if TYPE_CHECKING:
    from serving.protocol.app_spec import ServedApp, ServedPool

INGRESS = "Ingress"
INGRESS_REQUESTS = 100_000
"""Serve's request limit of the ingress: never reached, because admission control is the limit."""

ENDPOINT_VARIABLES = (KEYS_FILE, ORIGINS, MAX_OUTPUT_TOKENS, ADMISSION, FORMER_NAME)
"""Environment variables that the endpoint's replica inherits: the keys' file, never the keys."""


def from_plan(args: dict[str, str]) -> Any:  # noqa: ANN401
    """
    Return the application of a plan: the `import_path` of `serving manifest`.

    *args* and errors as in `serving.deployment.manifest.compile_from_args`.
    """
    return build_app(compile_from_args(args, os.environ))


def build_app(served: ServedApp, address: tuple[str, int] | None = None) -> Any:  # noqa: ANN401
    """Return the application for `serve.run`; see `serving.replicas.ingress` for *address*."""
    config = to_plain(served.endpoint)
    prefill = {
        pool.domain: _bound(pool, SplitPrefillServer, config) for pool in served.of("prefill")
    }
    servers = {pool.domain: _bound(pool, MixedServer, config) for pool in served.of("mixed")}
    for pool in served.of("decode"):
        servers[pool.domain] = _bound(
            pool,
            SplitDecodeServer,
            config,
            prefill_server=prefill[served.endpoint.prefill_domain(pool.domain)],
            prefill_servers=prefill,
            domain=pool.domain,
        )
    variables = {name: os.environ[name] for name in ENDPOINT_VARIABLES if name in os.environ}
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=1,
        max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={
            "num_cpus": 0,
            # The endpoint's address is the head's, and `serving scale` never stops that raylet.
            "resources": {"node:__internal_head__": 0.001},
            "runtime_env": {"env_vars": IN_ONE_THREAD | variables},
        },
    )
    return ingress.bind(config, servers=servers, prefill=prefill, address=address)


def _bound(pool: ServedPool, server: type, config: dict[str, Any], **bound: Any) -> Any:  # noqa: ANN401
    """
    Bind one deployment; Ray gets its own copy of the settings, because it writes into it.

    The deployment's version is its engine's: another plan with the same engine reaches the running
    replicas as their `user_config`, and only another engine starts new ones.
    """
    llm_config = copy.deepcopy(dict(pool.llm_config))
    llm_config["deployment_config"]["user_config"] = config
    app = build_llm_deployment(
        LLMConfig(**llm_config), name_prefix=pool.prefix, bind_kwargs=bound, deployment_cls=server
    )
    engine = {key: value for key, value in pool.llm_config.items() if key != "deployment_config"}
    digest = hashlib.sha256(json.dumps(engine, sort_keys=True, default=str).encode())
    return with_version(app, digest.hexdigest()[:16])
