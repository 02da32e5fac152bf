"""
Every private name of Ray and Ray Serve that serving uses, except those of the engine.

Ray 2.60.0; tests/serving/cluster/test_serve_compat.py reports the names that an upgrade removed.
Separate from `serving.replicas.vllm`, which imports vLLM and so takes seconds.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
import uuid
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray._private import state, worker
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve._private.constants import SERVE_LOGGER_NAME, SERVE_NAMESPACE
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.context import _get_global_client
from ray.serve.deployment import Deployment
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.generated.serve_pb2 import DeploymentRoute

if TYPE_CHECKING:
    from collections.abc import Callable

free_resources = state.available_resources_per_node

NO_REPLICA_ERRORS = (
    BackPressureError,
    DeploymentUnavailableError,
    RayActorError,
    TimeoutError,
)
"""The exceptions of a call of Ray Serve that no replica can take, or whose replica is gone."""

END_S = 5.0
"""Time that Ray has to end a worker after its SIGTERM."""


def set_replicas(app: str, deployment: str, replicas: int) -> None:
    """Set the number of replicas of a deployment, as Serve's REST interface does."""
    controller = _get_global_client()._controller  # noqa: SLF001
    ray.get(
        controller.update_deployment_replicas.remote(
            DeploymentID(name=deployment, app_name=app), replicas
        )
    )


def with_version(app: Any, version: str) -> Any:  # noqa: ANN401
    """
    Return a bound deployment that Serve updates in place while its version stays the same.

    Without a version Serve draws one for every deployment, and restarts all replicas.
    """
    app._bound_deployment._version = version  # noqa: SLF001
    return app


def running_deployment(app: str, name: str) -> Deployment:
    """
    Return a deployment as it runs.

    Deployed again as it is, Serve leaves its replicas alone, however many `set_replicas` has made.
    """
    controller = _get_global_client()._controller  # noqa: SLF001
    route = DeploymentRoute.FromString(ray.get(controller.get_deployment_info.remote(name, app)))
    info = DeploymentInfo.from_proto(route.deployment_info)
    config = info.deployment_config
    return Deployment(name, config, info.replica_config, version=info.version, _internal=True)


def deployment_options(app: str) -> dict[str, dict[str, Any]]:
    """Return Serve's options of each deployment of *app*, by name."""
    details = _get_global_client().get_serve_details()
    deployments = details["applications"].get(app, {}).get("deployments", {})
    return {name: shown["deployment_config"] for name, shown in deployments.items()}


def live_replica_ids(handle: Any) -> frozenset[str] | None:  # noqa: ANN401
    """
    Return the names of the replicas that *handle* can call now; `None`: it does not know yet.

    The handle learns from the controller, and knows them while that restarts.
    """
    if not handle.is_initialized:
        handle._init()  # noqa: SLF001
    router = handle._router._asyncio_router  # noqa: SLF001
    if not router.running_replicas_populated() or router.request_router is None:
        return None
    return frozenset(replica_id.unique_id for replica_id in router.request_router.curr_replicas)


def serve_logs() -> Path:
    """Return the folder of Ray Serve's logs, in a replica."""
    return Path(get_serve_logs_dir())


def call_replicas(
    handle: Any,  # noqa: ANN401
    method: str,
    arguments: Callable[[], list[Any]],
) -> list[Any]:
    """
    Call a method of every replica that *handle* knows; return Ray's references of their answers.

    As Ray's `broadcast`, which waits without limit: its thread would outlive Ctrl-C, and call a Ray
    that has been shut down.
    """
    references = []
    for replica in _running(handle):
        with suppress(ValueError):  # it has ended
            references.append(_called(replica, method, *arguments()))
    return references


async def places_of_replica(handle: Any, name: str) -> Any:  # noqa: ANN401
    """Return what `EngineServer.channel_places` of one replica returns; raises any error of Ray."""
    [replica] = [running for running in _running(handle) if running.unique_id == name]
    return await _called(replica, "channel_places")


def _running(handle: Any) -> list[Any]:  # noqa: ANN401
    running: list[Any] = handle._router._asyncio_router.request_router.curr_replicas  # noqa: SLF001
    return running


def _called(replica: Any, method: str, *arguments: object) -> Any:  # noqa: ANN401
    """Call one replica, as the router of no handle would; raises ValueError if it has ended."""
    name = f"call-{uuid.uuid4()}"
    metadata = RequestMetadata(request_id=name, internal_request_id=name, call_method=method)
    actor = ray.get_actor(replica.to_full_id_str(), namespace=SERVE_NAMESPACE)
    return actor.handle_request.remote(pickle.dumps(metadata), *arguments)


def before_sigterm(wait: Callable[[], object]) -> None:
    """
    Call *wait*, in a thread, when SIGTERM comes to this worker of Ray, and let it end afterwards.

    Ray's handler ends it at once, and only the main thread, which is Ray's, may set another one:
    so we replace what that handler calls (ray 2.60.0, `Worker.main_loop`). Ray then waits until
    the worker's pending calls are answered, and Serve's for news of deployments take a minute, in
    which no other endpoint can listen at its port: it gets `END_S`.
    """
    leave = worker.raise_sys_exit_with_custom_error_message
    begun, over = threading.Event(), threading.Event()

    def end() -> None:
        try:
            wait()
        finally:
            over.set()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(END_S)
            os._exit(1)

    def on_sigterm(*given: Any, **named: Any) -> None:  # noqa: ANN401
        if over.is_set():
            leave(*given, **named)
        elif not begun.is_set():
            begun.set()
            threading.Thread(target=end, daemon=True).start()

    worker.raise_sys_exit_with_custom_error_message = on_sigterm


def keep_log_open() -> None:
    """
    Keep this replica's log open when a library configures logging.

    NIXL and vLLM do so on import, and Python then closes all existing handlers. Serve's controller
    asks for the name of a replica's log after a restart of its own, and stops the replicas that no
    longer know it: all of them (ray 2.60.0, `get_component_logger_file_path`).
    """
    for handler in logging.getLogger(SERVE_LOGGER_NAME).handlers:
        if isinstance(handler, MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]
