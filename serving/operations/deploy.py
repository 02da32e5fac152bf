"""Deployment: check and compile a plan, start it, and wait until requests get through."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError, TargetFailed
from minicluster.files import write_atomically
from minicluster.plan import read_deployment, to_json
from serving.api.auth import KEYS, KEYS_FILE
from serving.cluster.local_cluster import read_cluster
from serving.cluster.logs import root_cause
from serving.cluster.ports import NIXL_PORT, free_nixl_port, is_free
from serving.cluster.raylets import new_session, start_nodes
from serving.cluster.state import HOME, TOKEN, State, read_state, remove_state, write_state
from serving.cluster.token import refuse_missing_certificates
from serving.deployment.compile import compile_app, plan_hash, ray_nodes
from serving.deployment.cpu_fallback import substituted
from serving.deployment.engine_args import DeployTarget
from serving.deployment.feasibility import findings, missing_nodes, refuse
from serving.deployment.target import located, this_machine
from serving.operations.down import take_down
from serving.operations.status import is_gone
from serving.protocol.app_spec import APP
from serving.protocol.messages import Readiness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minicluster.plan import Deployment, Plan
    from serving.deployment.target import Target
    from serving.protocol.app_spec import ServedApp

START_LIMIT_S = 900.0
"""Longest start: loading hundreds of gigabytes of weights takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """
    The endpoint's address, the Ray cluster, and overrides of the plan.

    Attributes:
        target: `cpu` or `gpu`.
        host: address that the endpoint listens on.
        port: port that the endpoint listens on.
        address: of an existing Ray cluster; `None`: one is started on this machine.
        wait_s: longest wait for that cluster's nodes.
        deadlines_s: of prefill and of the KV hand-off; `None`: the plan's.
        token_limit: most tokens of one answer; `None`: what the context has room for.
    """

    target: str
    host: str
    port: int
    address: str | None = None
    wait_s: float = 0.0
    deadlines_s: tuple[float | None, float | None] = (None, None)
    token_limit: int | None = None

    @property
    def base_url(self) -> str:
        """The endpoint's URL."""
        return f"http://{self.host}:{self.port}"


def deploy(
    served: ServedApp,
    site: Site,
    state: State,
    *,
    deployment: Deployment,
    plan: Plan | None,
    report: Callable[[str], None],
) -> tuple[State, Readiness]:
    """
    Start a compiled plan and wait until it is ready; a failure or Ctrl-C leaves nothing behind.

    Args:
        served: what to start.
        site: where.
        state: `new_state`, or that of a deployment on the same nodes, which is updated in place:
            Ray Serve keeps the replicas whose engines are the same.
        deployment: what *served* was compiled from, copied beside the state for `serving verify`.
        plan: the plan behind it, copied beside the state.
        report: receives a line of text about each step.

    Raises:
        TargetFailed: Ray or an engine did not start, or a probe failed.
    """
    state = _described(state, served, site, deployment, plan)
    write_state(state)
    try:
        if not state.address:
            address = start_nodes(
                served.nodes,
                cluster_id=state.cluster_id,
                session=Path(state.session),
                token=TOKEN,
                report=report,
            )
            state = replace(state, address=address)
            write_state(state)
        readiness = _serve(served, site, state, deployment.model.vocab_size, report)
    except BaseException:
        report("stopping what was started")
        take_down(state)
        raise
    state = replace(state, ready=True)
    write_state(state)
    return state, readiness


def new_state(site: Site, nixl_port: int) -> State:
    """Return the state of a deployment before its start."""
    state = State(
        cluster_id="",
        address=site.address or "",
        base_url="",
        target=site.target,
        plan=str(HOME / "plan.json"),
        plan_hash="",
        deployment=str(HOME / "deployment.json"),
        session="",
        nixl_port=nixl_port,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if site.address is None:
        return replace(state, cluster_id=secrets.token_hex(8), session=str(new_session()))
    from serving.cluster.connection import instance_of  # noqa: PLC0415  (a second to import)

    cluster = read_cluster()
    session = cluster.session if cluster is not None and cluster.address == site.address else ""
    return replace(state, session=session, instance=instance_of(site.address))


def _described(
    state: State, served: ServedApp, site: Site, deployment: Deployment, plan: Plan | None
) -> State:
    """Return *state* for this deployment, and copy plan and deployment beside the state file."""
    text = to_json(plan or deployment)
    HOME.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(state.plan), text)
    write_atomically(Path(state.deployment), to_json(deployment))
    return replace(
        state,
        base_url=site.base_url,
        plan_hash=plan_hash(text),
        planned=plan is not None,
        changes=served.endpoint.substitutions,
        deadlines_s=site.deadlines_s,
        token_limit=site.token_limit,
        ready=False,
    )


def _serve(
    served: ServedApp, site: Site, state: State, vocab_size: int, report: Callable[[str], None]
) -> Readiness:
    report("loading Ray Serve and vLLM")
    # Ray and vLLM would print their logs to the terminal, between the lines of *report*.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Imported here because they take seconds, which `serving down` and `status` do not need.
    from ray import serve  # noqa: PLC0415
    from ray.serve.schema import LoggingConfig  # noqa: PLC0415

    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.operations.probe import wait_until_ready  # noqa: PLC0415
    from serving.replicas.app import build_app  # noqa: PLC0415

    for logger in (logging.getLogger("ray.serve"), logging.getLogger("ray")):
        for each in (logger, *logger.handlers):
            each.addFilter(lambda record: record.levelno > logging.INFO)
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    with connected(state.address):
        serve.start(proxy_location="Disabled", logging_config=quiet)
        serve.run_many(
            [
                serve.RunTarget(
                    build_app(served, (site.host, site.port)),
                    name=APP,
                    logging_config=quiet,
                    external_scaler_enabled=True,  # `serving scale`
                )
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait_until_running(served, state.logs, report)
        return wait_until_ready(
            served, base_url=site.base_url, vocab_size=vocab_size, report=report
        )


def _wait_until_running(served: ServedApp, logs: Path, report: Callable[[str], None]) -> None:
    """Wait for every replica; raises TargetFailed with the cause if one does not start."""
    from ray import serve  # noqa: PLC0415

    deadline = time.monotonic() + START_LIMIT_S
    while True:
        status = serve.status().applications.get(APP)
        if status is not None and status.status == "RUNNING":
            return
        if status is not None and status.status in {"DEPLOY_FAILED", "UNHEALTHY"}:
            messages = [each.message for each in status.deployments.values()]
            raise TargetFailed(root_cause(logs, "\n".join([*messages, status.message])))
        if time.monotonic() > deadline:
            raise TargetFailed(
                f"not up after {START_LIMIT_S:.0f} s: {root_cause(logs, 'no error logged')}"
            )
        up = {
            name: each.replica_states.get("RUNNING", 0)
            for name, each in (status.deployments.items() if status is not None else ())
        }
        report(
            "starting engines: "
            + ", ".join(
                f"{p.prefix[:-1].lower()} {up.get(p.name, 0)} of {p.replicas}" for p in served.pools
            )
        )
        time.sleep(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A running deployment; `base_url` has no trailing slash."""

    base_url: str
    model_id: str
    readiness: Readiness
    state: State


def bring_up(  # noqa: PLR0913  (deployment, place, plan and three options)
    deployment: Deployment,
    site: Site,
    *,
    report: Callable[[str], None],
    plan: Plan | None = None,
    substitute: bool = False,
    decode_engine_kwargs: Mapping[str, Any] | None = None,
    before_start: Callable[[Deployment], None] | None = None,
) -> Endpoint:
    """
    Check, compile and deploy; returns when ready.

    A plan for the same nodes as a running deployment to measure (`serving up deployment.json`)
    updates it in place: engines with the same settings keep running.

    Args:
        deployment: what is to run.
        site: where.
        report: receives a line of text about each step.
        plan: the plan behind the deployment, if there is one.
        substitute: reduce it to what this CPU holds, and record every change.
        decode_engine_kwargs: further vLLM arguments of the decode pool; tests inject faults there.
        before_start: called with the deployment after all checks, before a first start.

    Raises:
        NegativeAnswer: the deployment cannot be realised there; one reason per line.
        InputError: there is a deployment from this directory already, the port is taken, or the
            cluster's token is missing.
        TargetFailed: it did not become ready, and has been stopped.
    """
    raylets = _raylets(deployment, site, report)
    labels = None if raylets is None else tuple(each.labels for each in raylets)
    target = this_machine(site.target, labels)
    deployment = located(deployment)
    changes: tuple[str, ...] = ()
    if substitute:
        deployment, changes = substituted(deployment, target)
    state = _check(deployment, site, target)
    one_host = raylets is None or len({each.address for each in raylets}) == 1
    if state is None:
        if before_start is not None:
            before_start(deployment)
        workers = max(pool.gpus for pool in deployment.pools)
        state = new_state(site, free_nixl_port(workers) if one_host else NIXL_PORT)
    served = compile_app(
        deployment,
        DeployTarget(
            kind=site.target,
            one_host=one_host,
            nixl_port=state.nixl_port,
            decode_engine_kwargs=decode_engine_kwargs or {},
            deadlines_s=site.deadlines_s,
            token_limit=site.token_limit,
        ),
        plan=plan,
        substitutions=changes,
    )
    state, readiness = deploy(served, site, state, deployment=deployment, plan=plan, report=report)
    return Endpoint(
        base_url=state.base_url, model_id=served.model_id, readiness=readiness, state=state
    )


def _check(deployment: Deployment, site: Site, target: Target) -> State | None:
    """
    Refuse an unrealisable deployment or a taken address; remove the state of a dead deployment.

    Returns:
        The running deployment to measure that this one updates in place, if there is one.
    """
    refuse_missing_certificates(os.environ)
    running = read_state()
    if running is not None and is_gone(running):
        remove_state(running)
        running = None
    # The memory and cores of running engines would count as taken.
    if running is None:
        refuse(findings(deployment, target))
    elif not _can_update(deployment, running, site):
        raise InputError(
            "serving", running.base_url, "nothing deployed from this directory", "`serving down`"
        )
    if site.address is not None and KEYS in os.environ:
        raise InputError(KEYS, "set", f"{KEYS_FILE} where the cluster is not started here")
    ours = running is not None and running.base_url == site.base_url
    if not ours and not is_free(site.host, site.port):
        raise InputError(
            "--port", site.port, f"a port of {site.host} that is free", "choose another one"
        )
    return running


def _can_update(deployment: Deployment, running: State, site: Site) -> bool:
    """Return whether *running* is a deployment to measure on the same nodes and routing."""
    if running.planned or not running.ready or site.address not in {None, running.address}:
        return False
    measured = read_deployment(Path(running.deployment))
    return (
        site.target == running.target
        and deployment.model == measured.model
        and ray_nodes(deployment, site.target) == ray_nodes(measured, site.target)
        and deployment.routing.policy == measured.routing.policy
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raylet:
    """A node of an existing cluster."""

    address: str
    labels: dict[str, str]


def _raylets(
    deployment: Deployment, site: Site, report: Callable[[str], None]
) -> tuple[_Raylet, ...] | None:
    """Return the nodes of an existing cluster, when all are there; `None`: one will be started."""
    if site.address is None:
        return None
    import ray  # noqa: PLC0415  (only where a cluster is given)

    from serving.cluster.connection import connected  # noqa: PLC0415

    deadline = time.monotonic() + site.wait_s
    with connected(site.address):
        while True:
            found = tuple(
                _Raylet(address=node["NodeManagerAddress"], labels=node["Labels"])
                for node in ray.nodes()
                if node["Alive"]
            )
            missing = [*missing_nodes(deployment, tuple(each.labels for each in found))]
            if not missing or time.monotonic() > deadline:
                return found
            report(f"waiting for {len(missing)} node(s) of the cluster")
            time.sleep(1)
