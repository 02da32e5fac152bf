"""The state of a deployment, as the cluster reports it."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minicluster.errors import NegativeAnswer, TargetFailed
from serving.cluster.processes import cluster_processes
from serving.cluster.state import read_state
from serving.protocol.app_spec import APP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.cluster.state import State

FACTS_LIMIT_S = 30.0
"""Longest time for a deployment to report its settings; a replica with a full batch is slow."""

ROLES = ("prefill", "decode", "mixed")
WORST_FIRST = ("DEPLOY_FAILED", "UNHEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING", "HEALTHY")
"""Statuses by severity; the worst is that of several deployments together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """
    The running part of a deployment.

    Attributes:
        replicas: running replicas by role.
        status: Ray Serve's status by role.
        facts: by role, the settings of each running replica's engine
            (`serving.replicas.engine_compat.engine_facts`).
        silent: by role, the deployments whose replicas did not all report these in time.
        answers: the endpoint answers /health with 200.
        options: by role, Ray Serve's options of each deployment, by name.
    """

    replicas: dict[str, int]
    status: dict[str, str]
    facts: dict[str, list[dict[str, Any]]]
    answers: bool
    silent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


def current() -> State:
    """
    Return the deployment of this directory.

    Raises:
        NegativeAnswer: there is none.
        TargetFailed: there was one, and its processes are gone.
    """
    state = read_state()
    if state is None:
        raise NegativeAnswer("nothing is deployed from this directory (`serving up plan.json`)")
    if state.cluster_id and not cluster_processes(state.cluster_id):
        raise TargetFailed(
            f"the cluster started {state.started} is gone; `serving down` clears what is left"
        )
    return state


def is_gone(state: State) -> bool:
    """Return whether the cluster of a deployment has ended; another may have its address now."""
    if state.cluster_id:
        return not cluster_processes(state.cluster_id)
    from serving.cluster.connection import instance_of  # noqa: PLC0415  (a second to import)

    try:
        return state.instance not in {"", instance_of(state.address)}
    except TargetFailed:
        return True


def cluster_status(state: State, *, facts: bool = False) -> Deployed:
    """Return the state of a deployment; with *facts* also the settings of every engine."""
    from ray import serve  # noqa: PLC0415  (a second to import)

    from serving.cluster.connection import connected  # noqa: PLC0415

    with connected(state.address):
        app = serve.status().applications.get(APP)
        found = by_role(app.deployments if app is not None else {})
        reported = {
            role: {name: _facts(name) for name, each in of_role.items() if _running(each)}
            for role, of_role in (found if facts else {}).items()
        }
        return Deployed(
            replicas={
                role: sum(map(_running, of_role.values())) for role, of_role in found.items()
            },
            status={role: _worst(of_role.values()) for role, of_role in found.items()},
            facts={
                role: [fact for each in of_role.values() for fact in each or ()]
                for role, of_role in reported.items()
            },
            silent={
                role: tuple(name for name, each in of_role.items() if each is None)
                for role, of_role in reported.items()
            },
            answers=_answers(state.base_url),
            options=_options(found) if facts else {},
        )


def by_role(deployments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each role's deployments, one per domain, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, deployment in deployments.items():
        role = name.partition(":")[0].partition("-")[0].lower()
        if role in ROLES:
            found.setdefault(role, {})[name] = deployment
    return found


def _options(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    from serving.cluster.serve_compat import (  # noqa: PLC0415  (a second to import)
        deployment_options,
    )

    options = deployment_options(APP)
    return {role: {name: options[name] for name in of_role} for role, of_role in found.items()}


def _worst(deployments: Iterable[Any]) -> str:
    found = [each.status.value for each in deployments]
    return next((status for status in WORST_FIRST if status in found), found[0])


def _running(deployment: Any) -> int:  # noqa: ANN401
    running: int = deployment.replica_states.get("RUNNING", 0)
    return running


def _facts(name: str) -> list[dict[str, Any]] | None:
    """Return the engine settings of every replica of a deployment; `None`: not all answer."""
    from ray import serve  # noqa: PLC0415

    # vLLM, which this imports, would log on stdout, which is for data.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from serving.cluster.serve_compat import broadcast  # noqa: PLC0415
    from serving.replicas.serve_backend import NO_REPLICA_ERRORS  # noqa: PLC0415

    handle = serve.get_deployment_handle(name, APP)
    pool = ThreadPoolExecutor(max_workers=1)
    # The first ordinary call of a handle finds its replicas.
    first = handle.facts.remote()
    try:
        first.result(timeout_s=FACTS_LIMIT_S)
        future = pool.submit(broadcast, handle, "facts")
        answers: list[dict[str, Any]] = future.result(timeout=FACTS_LIMIT_S)
    except NO_REPLICA_ERRORS:
        first.cancel()  # its router would go on looking for a replica, and start a Ray for that
        return None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return answers


def _answers(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=10) as answer:  # noqa: S310
            return bool(answer.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False
