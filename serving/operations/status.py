"""The state of a deployment, as the cluster reports it."""

from __future__ import annotations

import os
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minicluster.errors import NegativeAnswer, TargetFailed
from serving.api.tls import trusting
from serving.cluster.processes import cluster_processes
from serving.cluster.state import UNFINISHED, read_state
from serving.protocol.app_spec import APP, POOL_NAME

if TYPE_CHECKING:
    from serving.cluster.state import State

FACTS_LIMIT_S = 30.0
"""Longest time for a deployment to report its settings; a replica with a full batch is slow."""

WORST_FIRST = ("DEPLOY_FAILED", "UNHEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING", "HEALTHY")
"""Statuses by severity; the worst is that of several deployments together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedPool:
    """
    The running part of a pool.

    Attributes:
        status: Ray Serve's status of its deployments, the worst if there are several.
        facts: settings of each running replica's engine (`AnswerEngine.facts`).
        silent: deployments whose replicas did not all report these in time.
        options: Ray Serve's options of each deployment, by name.
    """

    replicas: int = 0
    status: str = "missing"
    facts: list[dict[str, Any]] = field(default_factory=list)
    silent: tuple[str, ...] = ()
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """The running part of a deployment; `answers`: the endpoint answers /health with 200."""

    pools: dict[str, DeployedPool]
    answers: bool

    def pool(self, role: str) -> DeployedPool:
        """Return the pool of a role, empty where there is none."""
        return self.pools.get(role, DeployedPool())


def current() -> State:
    """
    Return the deployment of this directory.

    Raises:
        NegativeAnswer: there is none.
        TargetFailed: there was one, and its processes are gone; or its Ray is not up.
    """
    state = read_state()
    if state is None:
        raise NegativeAnswer("nothing is deployed from this directory (`serving up plan.json`)")
    if state.cluster_id and not cluster_processes(state.cluster_id):
        raise TargetFailed(
            f"the cluster started {state.started} is gone; `serving down` clears what is left"
        )
    if not state.address:
        raise TargetFailed(
            f"`serving up`, begun {state.started}, {UNFINISHED} (`serving down` clears what is"
            " left)"
        )
    return state


def is_gone(state: State) -> bool:
    """Return whether a deployment has ended, or does not answer."""
    if state.cluster_id:
        return not cluster_processes(state.cluster_id)
    from serving.cluster.connection import connected  # noqa: PLC0415  (a second to import)
    from serving.replicas.app import owner_of  # noqa: PLC0415

    try:
        with connected(state.address):
            return is_replaced(state) or owner_of(APP) is None
    except TargetFailed:
        return True


def is_replaced(state: State) -> bool:
    """
    Return whether something else has the place of a deployment on a foreign cluster.

    Another cluster may have its address now, or another directory has deployed there instead.

    Raises:
        TargetFailed: nothing answers there.
    """
    # Imported here because they take seconds.
    from serving.cluster.connection import connected, instance_of  # noqa: PLC0415
    from serving.replicas.app import owner_of  # noqa: PLC0415

    with connected(state.address):
        if state.instance not in {"", instance_of(state.address)}:
            return True
        return owner_of(APP) not in {None, state.owner}


def running_app() -> Any:  # noqa: ANN401
    """
    Return our application as Ray Serve reports it; needs a connection.

    Raises:
        TargetFailed: it is not there.
    """
    from ray import serve  # noqa: PLC0415  (a second to import)

    app = serve.status().applications.get(APP)
    if app is None:
        raise TargetFailed(
            "the deployment has been taken down elsewhere; `serving down` clears its record"
        )
    return app


def cluster_status(state: State, *, facts: bool = False) -> Deployed:
    """Return the state of a deployment; with *facts* also the settings of every engine."""
    from ray import serve  # noqa: PLC0415  (a second to import)

    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.cluster.serve_compat import deployment_options  # noqa: PLC0415

    with connected(state.address):
        app = serve.status().applications.get(APP)
        options = deployment_options(APP) if facts and app is not None else {}
        pools = {}
        deployments = dict(app.deployments) if app is not None else {}
        for role, by_name in by_role(deployments, state.generation).items():
            running = {
                name: deployment.replica_states.get("RUNNING", 0)
                for name, deployment in by_name.items()
            }
            statuses = {deployment.status.value for deployment in by_name.values()}
            reported = {name: _facts(name) for name in by_name if facts and running[name]}
            pools[role] = DeployedPool(
                replicas=sum(running.values()),
                status=min(statuses, key=WORST_FIRST.index),
                facts=[fact for deployment in reported.values() for fact in deployment or ()],
                silent=tuple(name for name, deployment in reported.items() if deployment is None),
                options={name: options[name] for name in by_name if facts},
            )
        return Deployed(pools=pools, answers=_answers(state))


def by_role(deployments: dict[str, Any], generation: int) -> dict[str, dict[str, Any]]:
    """Return each role's deployments of one generation, one per domain, by name."""
    roles: dict[str, dict[str, Any]] = {}
    for name, deployment in deployments.items():
        pool = POOL_NAME.match(name)
        if pool is not None and int(pool["generation"] or 1) == generation:
            roles.setdefault(pool["role"].lower(), {})[name] = deployment
    return roles


def _facts(name: str) -> list[dict[str, Any]] | None:
    # vLLM, which this imports, would log on stdout, which is for data.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from serving.cluster.serve_compat import NO_REPLICA_ERRORS  # noqa: PLC0415
    from serving.operations.probe import ask_replicas, known_handle  # noqa: PLC0415

    try:
        return ask_replicas(known_handle(name, FACTS_LIMIT_S), "facts", FACTS_LIMIT_S)
    except NO_REPLICA_ERRORS:
        return None


def _answers(state: State) -> bool:
    url = f"{state.base_url}/health"
    try:
        context = trusting(state.tls_cert)
        with urllib.request.urlopen(url, timeout=10, context=context) as answer:  # noqa: S310
            return bool(answer.status == 200)  # noqa: PLR2004
    except OSError:
        return False
