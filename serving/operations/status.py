"""What is deployed, as the cluster itself says."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minicluster.errors import NegativeAnswer, TargetFailed
from serving.cluster.processes import marked
from serving.cluster.state import read_state
from serving.protocol.app_spec import APP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serving.cluster.state import State

FACTS_LIMIT_S = 30.0
"""How long a deployment may take to tell its settings: a full batch is slow."""

ROLES = ("prefill", "decode", "mixed")
UNHEALTHY_FIRST = ("DEPLOY_FAILED", "UNHEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING", "HEALTHY")
"""What one word says of several deployments: the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """
    What runs of one deployment.

    Attributes:
        replicas: per role, those that run.
        status: per role, as Ray Serve calls it.
        facts: per role, what each running replica's engine has (`serving.replicas.engine_facts`).
        silent: per role, the deployments whose replicas run and did not all tell these in time.
        answers: the endpoint answers /health with 200.
        options: per role, Ray Serve's options of each deployment, by name.
    """

    replicas: dict[str, int]
    status: dict[str, str]
    facts: dict[str, list[dict[str, Any]]]
    answers: bool
    silent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


def current() -> State:
    """
    Return what is deployed from this directory.

    Raises:
        NegativeAnswer: nothing is.
        TargetFailed: something was, and its processes are gone.
    """
    state = read_state()
    if state is None:
        raise NegativeAnswer("nothing is deployed from this directory (`serving up plan.json`)")
    if state.cluster_id and not marked(state.cluster_id):
        raise TargetFailed(
            f"the cluster started {state.started} is gone; `serving down` clears what is left"
        )
    return state


def is_gone(state: State) -> bool:
    """Tell whether the cluster of a deployment runs no more; another may have its address now."""
    if state.cluster_id:
        return not marked(state.cluster_id)
    from serving.cluster.connection import instance_of  # noqa: PLC0415  (a second to import)

    try:
        return state.instance not in {"", instance_of(state.address)}
    except TargetFailed:
        return True


def look(state: State, *, facts: bool = False) -> Deployed:
    """Ask the cluster; with *facts* also every engine."""
    from ray import serve  # noqa: PLC0415  (a second to import)

    from serving.cluster.connection import connected  # noqa: PLC0415

    with connected(state.address):
        app = serve.status().applications.get(APP)
        found = by_role(app.deployments if app is not None else {})
        told = {
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
                for role, of_role in told.items()
            },
            silent={
                role: tuple(name for name, each in of_role.items() if each is None)
                for role, of_role in told.items()
            },
            answers=_answers(state.base_url),
            options=_options(found) if facts else {},
        )


def by_role(deployments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each role's deployments, one a domain, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, deployment in deployments.items():
        role = name.partition(":")[0].partition("-")[0].lower()
        if role in ROLES:
            found.setdefault(role, {})[name] = deployment
    return found


def _options(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Ask Serve what it runs each deployment with."""
    from serving.cluster.serve_compat import (  # noqa: PLC0415  (a second to import)
        deployment_options,
    )

    options = deployment_options(APP)
    return {role: {name: options[name] for name in of_role} for role, of_role in found.items()}


def _worst(deployments: Iterable[Any]) -> str:
    """Return the status of the deployment that is worst off."""
    said = [each.status.value for each in deployments]
    return next((status for status in UNHEALTHY_FIRST if status in said), said[0])


def _running(deployment: Any) -> int:  # noqa: ANN401
    """Return how many replicas of a deployment run."""
    running: int = deployment.replica_states.get("RUNNING", 0)
    return running


def _facts(name: str) -> list[dict[str, Any]] | None:
    """Ask every replica of a deployment for its engine's settings; `None`: not all answer."""
    from ray import serve  # noqa: PLC0415

    # vLLM, which this imports, would log on stdout, and that is for data.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from serving.cluster.serve_compat import broadcast  # noqa: PLC0415
    from serving.replicas.serve_backend import NOBODY  # noqa: PLC0415

    handle = serve.get_deployment_handle(name, APP)
    pool = ThreadPoolExecutor(max_workers=1)
    # A handle learns of the replicas with its first ordinary call.
    first = handle.facts.remote()
    try:
        first.result(timeout_s=FACTS_LIMIT_S)
        future = pool.submit(broadcast, handle, "facts")
        answers: list[dict[str, Any]] = future.result(timeout=FACTS_LIMIT_S)
    except NOBODY:
        first.cancel()  # its router would go on looking for a replica, and start a Ray for that
        return None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return answers


def _answers(base_url: str) -> bool:
    """Tell whether the endpoint calls itself healthy."""
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=10) as answer:  # noqa: S310
            return bool(answer.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False
