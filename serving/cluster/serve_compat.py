"""
Every private name of Ray and Ray Serve that serving uses, except those of the engine.

Ray 2.60.0; tests/serving/cluster/test_serve_compat.py reports the names that an upgrade removed.
Separate from `serving.replicas.vllm_answers`, which imports vLLM and so takes seconds.
"""

from __future__ import annotations

import asyncio
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
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray._private import state, worker
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve._private.constants import SERVE_LOGGER_NAME, SERVE_NAMESPACE
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.context import _get_global_client
from ray.serve.deployment import Deployment
from ray.serve.generated.serve_pb2 import DeploymentRoute

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

free_resources = state.available_resources_per_node

DIRECT_CALLS = {"_by_reference": False}
"""
Handle options with which calls go to the replica by gRPC instead of as tasks of Ray: some 2 ms
less per message on the demo's cores. Every replica listens for them anyway.
"""

LIVE_POLL_S = 0.1
"""Interval at which a pending call checks that a replica is left."""

END_S = 5.0
"""Time that Ray has to end a worker after its SIGTERM."""

Answer = TypeVar("Answer")


class NoReplica(Exception):
    """The deployment has no replica left; Ray Serve would hold the call until there is one."""


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
    return {name: each["deployment_config"] for name, each in deployments.items()}


def live_replicas(handle: Any) -> int | None:  # noqa: ANN401
    """Return the number of replicas that *handle* can call now; `None`: it does not know yet."""
    found = live_replica_ids(handle)
    return None if found is None else len(found)


def live_replica_ids(handle: Any) -> frozenset[str] | None:  # noqa: ANN401
    """
    Return the names of the replicas that *handle* can call now; `None`: it does not know yet.

    The handle learns from the controller, and at once from a call that finds a replica dead.
    """
    if not handle.is_initialized:
        handle._init()  # noqa: SLF001
    router = handle._router._asyncio_router  # noqa: SLF001
    if not router.running_replicas_populated() or router.request_router is None:
        return None
    return frozenset(each.unique_id for each in router.request_router.curr_replicas)


async def while_live(handle: Any, answer: Awaitable[Answer]) -> Answer:  # noqa: ANN401
    """
    Return the answer of a call through *handle*, as long as there is a replica.

    A gRPC call that fails does not remove its replica from Serve's list: the next call finds out,
    and then waits inside Serve for another replica, without limit (ray 2.60.0,
    `route_and_send_request` "will block indefinitely if no replicas are available").

    Raises:
        NoReplica: no replica is left; the call is cancelled.
    """
    waiting = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({waiting}, timeout=LIVE_POLL_S))[0]:
            if live_replicas(handle) == 0:
                raise NoReplica(handle.deployment_name)
        return waiting.result()
    finally:
        waiting.cancel()
        # Serve raises in what was cancelled, and asyncio would log that nobody looked.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())


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
    request_router = handle._router._asyncio_router.request_router  # noqa: SLF001
    references = []
    for replica in request_router.curr_replicas:
        name = f"broadcast-{uuid.uuid4()}"
        asked = RequestMetadata(request_id=name, internal_request_id=name, call_method=method)
        with suppress(ValueError):  # it has ended
            actor = ray.get_actor(replica.to_full_id_str(), namespace=SERVE_NAMESPACE)
            references.append(actor.handle_request.remote(pickle.dumps(asked), *arguments()))
    return references


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
