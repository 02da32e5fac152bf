"""
What we take from Ray and Ray Serve that they do not promise to keep, the engine's side apart.

Ray 2.60.0; tests/serving/test_serve_compat.py says which name is gone after an upgrade. Apart from
`serving.replicas.engine_compat`, which imports vLLM: seconds that a command has no use for.
"""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.llm._internal.serve.utils.broadcast import broadcast
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.context import _get_global_client

__all__ = [
    "STRAIGHT",
    "broadcast",
    "deployment_options",
    "free_resources",
    "keep_log",
    "live_replicas",
    "set_replicas",
    "with_version",
]

STRAIGHT = {"_by_reference": False}
"""
Options of a handle whose calls go to the replica by gRPC instead of as tasks of Ray: some 2 ms
less a message on the demo's cores. Every replica listens for them, used or not.
"""


def free_resources() -> dict[str, dict[str, float]]:
    """Return what each live node has left, by the node's id."""
    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def set_replicas(app: str, deployment: str, replicas: int) -> None:
    """Tell Serve how many replicas a deployment has, as its REST interface would."""
    controller = _get_global_client()._controller  # noqa: SLF001
    ray.get(
        controller.update_deployment_replicas.remote(
            DeploymentID(name=deployment, app_name=app), replicas
        )
    )


def with_version(app: Any, version: str) -> Any:  # noqa: ANN401
    """
    Return a bound deployment that Serve updates in place as long as its version is the same.

    Without one Serve draws a version for every deployment, and starts all replicas anew.
    """
    app._bound_deployment._version = version  # noqa: SLF001
    return app


def deployment_options(app: str) -> dict[str, dict[str, Any]]:
    """Return the options that Serve runs each deployment of *app* with, by name."""
    details = _get_global_client().get_serve_details()
    deployments = details["applications"].get(app, {}).get("deployments", {})
    return {name: each["deployment_config"] for name, each in deployments.items()}


def live_replicas(handle: Any) -> int | None:  # noqa: ANN401
    """
    Return how many replicas *handle* can call at this moment; `None`: it does not know yet.

    It learns from the controller, and at once from a call that finds a replica dead.
    """
    if not handle.is_initialized:
        handle._init()  # noqa: SLF001
    router = handle._router._asyncio_router  # noqa: SLF001
    if not router.running_replicas_populated() or router.request_router is None:
        return None
    return len(router.request_router.curr_replicas)


def keep_log() -> None:
    """
    Keep this replica's log open, whoever configures logging from now on.

    NIXL does when it is imported, vLLM too, and Python then closes all handlers there are. Serve's
    controller asks for the name of a replica's log when it has died and come back, and stops the
    replicas that no longer know it: all of them (ray 2.60.0, `get_component_logger_file_path`).
    """
    for handler in logging.getLogger(SERVE_LOGGER_NAME).handlers:
        if isinstance(handler, MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]
