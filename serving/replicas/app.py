"""The Ray Serve application: the endpoint and the pools of the plan."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.deployment import Application

from serving.admission.controller import ADMISSION
from serving.api.access import HOSTS, KEYS_FILE, ORIGINS
from serving.cluster.serve_compat import deployment_options, running_deployment, with_version
from serving.deployment.compile import DRAIN_POLL_S, IN_ONE_THREAD
from serving.deployment.manifest import compile_from_args
from serving.protocol.app_spec import GATE, INGRESS
from serving.protocol.messages import to_plain
from serving.replicas.gate_server import GateServer
from serving.replicas.ingress import CLOSE_S, Ingress
from serving.replicas.simulated_servers import SimulatedAnswerServer, SimulatedPrefillServer
from serving.request.cost import MAX_OUTPUT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.api.tls import TlsFiles
    from serving.protocol.app_spec import ServedApp, ServedPool

OPTIONS = "deployment_config"
"""Field of a pool's settings with the options of its Ray Serve deployment."""

INGRESS_REQUESTS = 100_000
"""Serve's request limit of the ingress: never reached, because admission control is the limit."""

WATCH_S = 1.0
"""Interval at which Ray Serve looks at gate and endpoints: requests wait while one is gone."""

ENDPOINT_VARIABLES = (KEYS_FILE, ORIGINS, HOSTS, MAX_OUTPUT_TOKENS, ADMISSION)
"""Environment variables that the endpoint's replica inherits: the keys' file, never the keys."""

OWNER = "MINICLUSTER_OWNER"
"""Variable of the endpoint's replica with the owner of the application, where it has one."""

TRACING = "OTEL_"
"""Start of those of OpenTelemetry."""


def from_plan(args: dict[str, str]) -> Any:  # noqa: ANN401
    """
    Return the application of a plan: the `import_path` of `serving manifest`.

    *args* and errors as in `serving.deployment.manifest.compile_from_args`.
    """
    return build_app(compile_from_args(args, os.environ))


def build_app(
    served: ServedApp,
    address: tuple[str, int] | None = None,
    tls: TlsFiles | None = None,
    owner: str = "",
) -> Any:  # noqa: ANN401
    """
    Return the application for `serve.run`; *owner* is what `owner_of` returns of it.

    *address* and *tls*, the endpoint's certificate and key, are as in `serving.replicas.ingress`.
    """
    settings = endpoint_settings(served)
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in ENDPOINT_VARIABLES or name.startswith(TRACING)
    }
    options: dict[str, Any] = {
        "max_ongoing_requests": INGRESS_REQUESTS,
        "health_check_period_s": WATCH_S,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_S,
        "graceful_shutdown_timeout_s": settings["drain_s"] + 2 * CLOSE_S,
        "ray_actor_options": {
            "num_cpus": 0,
            # The endpoint's address is the head's, and `serving scale` never stops that raylet.
            "resources": {"node:__internal_head__": 0.001},
            "runtime_env": {"env_vars": IN_ONE_THREAD | variables | {OWNER: owner}},
        },
    }
    gate = serve.deployment(
        GateServer, name=GATE, num_replicas=1, user_config=settings, **options
    ).bind(settings)
    if served.endpoint_hosts > 1:
        spread = {**options["ray_actor_options"], "resources": {}}
        per_host = math.ceil(served.endpoints / served.endpoint_hosts)
        options |= {"ray_actor_options": spread, "max_replicas_per_node": per_host}
    ingress = serve.deployment(
        Ingress, name=INGRESS, num_replicas=served.endpoints, **options
    ).bind(
        pools=[with_version(gate, _version(GATE)), *bind_pools(served)], address=address, tls=tls
    )
    return with_version(ingress, _version(repr((address, tls))))


def endpoint_settings(served: ServedApp) -> dict[str, Any]:
    """Return what the gate tells endpoints: the plan, its deployments by domain, and its drain."""
    drains_s = [pool.llm_config[OPTIONS]["graceful_shutdown_timeout_s"] for pool in served.pools]
    return {
        "config": to_plain(served.endpoint),
        "servers": {pool.domain: pool.name for pool in served.servers},
        "prefill": {pool.domain: pool.name for pool in served.of("prefill")},
        "drain_s": max(drains_s),
    }


def bind_pools(served: ServedApp) -> list[Any]:
    """Bind the deployments of all pools."""
    config = to_plain(served.endpoint)
    return [_bound(pool, config) for pool in (*served.of("prefill"), *served.servers)]


def changed_app(
    app: str, kept: Iterable[str], added: Iterable[Any], settings: dict[str, Any] | None = None
) -> Any:  # noqa: ANN401
    """
    Return a running application with other pools, for `serve.run`; needs a connection.

    Ray Serve leaves the endpoint and the *kept* deployments as they run, removes all others, and
    starts *added*, bound ones. *settings* are other ones for the gate and its endpoints.
    """
    gate, ingress = running_deployment(app, GATE), running_deployment(app, INGRESS)
    if settings is not None:
        options = {"graceful_shutdown_timeout_s": settings["drain_s"] + 2 * CLOSE_S}
        gate = gate.options(user_config=settings, _init_args=(settings,), **options)
        ingress = ingress.options(**options)
    pools = [*(Application(running_deployment(app, name)) for name in kept), *added]
    arguments = {**ingress.init_kwargs, "pools": [Application(gate), *pools]}
    return Application(ingress.options(_init_kwargs=arguments))


def owner_of(app: str) -> str | None:
    """Return the owner of *app* on the connected cluster; `None`: it does not run there."""
    if app not in serve.status().applications:  # nor Ray Serve, perhaps
        return None
    endpoint = deployment_options(app).get(INGRESS)
    if endpoint is None:
        return None
    owner: str = endpoint["ray_actor_options"]["runtime_env"]["env_vars"].get(OWNER, "")
    return owner


def _bound(pool: ServedPool, config: dict[str, Any]) -> Any:  # noqa: ANN401
    """
    Bind the deployment of a pool, with vLLM or simulated engines.

    The deployment's version is its engine's: another plan with the same engine reaches the running
    replicas as their `user_config`, and only another engine starts new ones.
    """
    if pool.simulated is not None:
        app, engine = _simulated(pool, config), repr(pool.simulated)
    else:
        app = _with_vllm(pool, config)
        settings = {key: value for key, value in pool.llm_config.items() if key != OPTIONS}
        engine = json.dumps(settings, sort_keys=True, default=str)
    return with_version(app, _version(engine))


def _version(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_vllm(pool: ServedPool, config: dict[str, Any]) -> Any:  # noqa: ANN401
    """Bind engines of vLLM; Ray gets its own copy of the settings, because it writes into it."""
    from ray.serve.llm import LLMConfig, build_llm_deployment  # noqa: PLC0415  (imports vLLM)

    from serving.replicas import vllm  # noqa: PLC0415

    llm_config = copy.deepcopy(dict(pool.llm_config))
    llm_config[OPTIONS]["user_config"] = config
    ranks: int = pool.llm_config["engine_kwargs"].get("data_parallel_size", 1)
    if ranks > 1:
        classes = (vllm.GroupedPrefillServer, vllm.GroupedAnswerServer)
        llm_config[OPTIONS]["num_replicas"] //= ranks  # Ray counts groups, and multiplies
    else:
        classes = (vllm.PrefillServer, vllm.AnswerServer)
    return build_llm_deployment(
        LLMConfig(**llm_config),
        name_prefix=pool.prefix,
        deployment_cls=classes[0] if pool.role == "prefill" else classes[1],
    )


def _simulated(pool: ServedPool, config: dict[str, Any]) -> Any:  # noqa: ANN401
    """Bind simulated engines, whose replicas need no place; one has all ranks of a group."""
    options = dict(pool.llm_config[OPTIONS])
    del options["placement_group_bundle_label_selector"]
    options["ray_actor_options"] = {"num_cpus": 0, "runtime_env": {"env_vars": IN_ONE_THREAD}}
    server = SimulatedPrefillServer if pool.role == "prefill" else SimulatedAnswerServer
    made = serve.deployment(server, name=pool.name, user_config=config, **options)
    return made.bind(pool.simulated)
