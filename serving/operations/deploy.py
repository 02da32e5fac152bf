"""Deployment: check and compile a plan, start it until requests get through, take it down."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from minicluster.command import uninterrupted
from minicluster.errors import SET, InputError, MiniclusterError, TargetFailed
from minicluster.plan import read_deployment, to_json
from serving.api.access import KEYS, KEYS_FILE
from serving.api.tls import TlsFiles
from serving.cluster.local_cluster import cluster_at
from serving.cluster.logs import root_cause
from serving.cluster.ports import NIXL_PORT, free_nixl_port, is_free
from serving.cluster.processes import cluster_processes, stop
from serving.cluster.raylets import session_path, start_nodes
from serving.cluster.state import (
    API_KEYS,
    DEPLOYMENT,
    PLAN,
    STATE,
    TOKEN,
    State,
    read_state,
    remove_state,
    write_state,
)
from serving.cluster.token import refuse_missing_certificates, write_private
from serving.deployment.compile import DRAIN_LIMIT_S, compile_app, ray_nodes
from serving.deployment.engine_args import SIMULATED, DeployTarget
from serving.deployment.feasibility import findings, missing_nodes, refuse
from serving.deployment.mapped_gpus import refuse_gpus
from serving.deployment.simulated import simulated_findings
from serving.deployment.target import located, this_machine
from serving.operations.status import is_gone, is_replaced, running_app
from serving.protocol.app_spec import APP, GATE, INGRESS

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from pathlib import Path

    from minicluster.plan import Deployment, Plan
    from serving.deployment.target import Target
    from serving.operations.probe import Readiness
    from serving.protocol.app_spec import ServedApp

FAILED = {"DEPLOY_FAILED", "UNHEALTHY"}
START_LIMIT_S = 900.0
"""Longest start: loading hundreds of gigabytes of weights takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """
    The endpoint's address, the Ray cluster, and what the plan is compiled for.

    Attributes:
        target: without the ports and the number of hosts, which the deployment finds out.
        address: address of an existing Ray cluster; `None`: one is started on this machine.
        wait_s: longest wait for that cluster's nodes.
        tls: certificate and key of the endpoint; `None`: plain HTTP.
    """

    target: DeployTarget
    host: str
    port: int
    address: str | None = None
    wait_s: float = 0.0
    tls: TlsFiles | None = None

    @property
    def base_url(self) -> str:
        """The endpoint's URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}"


def deploy(
    served: ServedApp,
    site: Site,
    state: State,
    *,
    record: Callable[[State], None],
    vocab_size: int,
    report: Callable[[str], None],
) -> tuple[State, Readiness]:
    """
    Start a compiled plan and wait until it is ready.

    Args:
        served: what to start.
        site: where.
        state: state of a deployment that is new, or is updated in place on the same nodes: Ray
            Serve keeps the replicas whose engines are the same.
        record: writes the state, before anything is started or changed, so that whoever reads it
            finds all that there is to stop.
        vocab_size: bound of the token ids of probes.
        report: receives a line of text about each step.

    Raises:
        InputError: another deployment runs on the cluster.
        TargetFailed: Ray or an engine did not start, or a probe failed.
    """
    move_keys(os.environ)
    if not state.address:
        record(state)
        preload(site.target.kind)
        address = start_nodes(
            served.nodes,
            cluster_id=state.cluster_id,
            token=TOKEN,
            report=report,
        )
        state = replace(state, address=address)
        write_state(state)
    load(site.target.kind, report)
    # Imported here because they take seconds, which `serving down` and `status` do not need.
    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.operations.probe import wait_until_ready  # noqa: PLC0415

    with connected(state.address):
        if read_state() is None:
            _refuse_another(state.address)
        record(state)
        from serving.replicas.app import build_app  # noqa: PLC0415

        run_application(build_app(served, (site.host, site.port), site.tls, state.owner))
        wait_until_running(served, state.logs, report)
        readiness = wait_until_ready(
            served,
            base_url=site.base_url,
            tls_cert=state.tls_cert,
            vocab_size=vocab_size,
            report=report,
        )
    state = replace(state, ready=True)
    write_state(state)
    return state, readiness


def preload(kind: str) -> None:
    """Begin to import vLLM beside the start of Ray, which mostly waits: 8 s less for the user."""
    if kind != SIMULATED:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        Thread(target=import_module, args=("ray.serve.llm",), daemon=True).start()


def load(kind: str, report: Callable[[str], None]) -> None:
    """Import what takes seconds; vLLM would print logs between the lines of *report*."""
    report("loading Ray Serve" + ("" if kind == SIMULATED else " and vLLM"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import serving.operations.probe  # noqa: F401, PLC0415


def move_keys(environ: MutableMapping[str, str]) -> None:
    """Move API keys from the environment, which every process inherits, into a file."""
    if KEYS in environ and KEYS_FILE not in environ:
        write_private(API_KEYS, environ.pop(KEYS).replace(",", "\n"))
        environ[KEYS_FILE] = str(API_KEYS.absolute())


def _new_state(site: Site, nixl_port: int) -> State:
    state = State(
        cluster_id="",
        address=site.address or "",
        base_url=site.base_url,
        target=site.target.kind,
        plan_hash="",
        session="",
        nixl_port=nixl_port,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if site.address is None:
        cluster_id = secrets.token_hex(8)
        return replace(state, cluster_id=cluster_id, session=str(session_path(cluster_id)))
    from serving.cluster.connection import instance_of  # noqa: PLC0415  (a second to import)

    cluster = cluster_at(site.address)
    session = "" if cluster is None else str(cluster.session)
    instance = instance_of(site.address)
    return replace(state, session=session, instance=instance, owner=secrets.token_hex(8))


def run_application(app: Any) -> None:  # noqa: ANN401
    """Have Ray Serve start or change the application; needs a connection."""
    from ray import serve  # noqa: PLC0415
    from ray.serve.schema import LoggingConfig  # noqa: PLC0415

    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    serve.start(proxy_location="Disabled", logging_config=quiet)
    serve.run_many(
        [
            serve.RunTarget(
                app,
                name=APP,
                logging_config=quiet,
                external_scaler_enabled=True,  # `serving scale`
            )
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def wait_until_running(served: ServedApp, logs: Path, report: Callable[[str], None]) -> None:
    """Wait for every replica; raises TargetFailed with the cause if one does not start."""
    names = {GATE, INGRESS, *(pool.name for pool in served.pools)}
    begun_s, deadline = time.time(), time.monotonic() + START_LIMIT_S
    while True:
        app = running_app()
        if app.status == "RUNNING":
            return
        deployments = {
            name: deployment for name, deployment in app.deployments.items() if name in names
        }
        if app.status in FAILED and any(
            deployment.status in FAILED for deployment in deployments.values()
        ):
            message = "\n".join(
                [*(deployment.message for deployment in deployments.values()), app.message]
            )
            raise TargetFailed(root_cause(logs, message, begun_s))
        if time.monotonic() > deadline:
            cause = root_cause(logs, "no error logged", begun_s)
            raise TargetFailed(f"not up after {START_LIMIT_S:.0f} s: {cause}")
        up = {
            name: deployment.replica_states.get("RUNNING", 0)
            for name, deployment in deployments.items()
        }
        counts = (
            f"{pool.prefix[:-1].lower()} {up.get(pool.name, 0)} of {pool.replicas}"
            for pool in served.pools
        )
        report("starting engines: " + ", ".join(counts))
        time.sleep(0.5)


def bring_up(
    deployment: Deployment,
    site: Site,
    *,
    report: Callable[[str], None],
    plan: Plan | None = None,
    before_start: Callable[[Deployment], None] | None = None,
) -> tuple[State, Readiness]:
    """
    Check, compile and deploy; returns when ready.

    A failure or Ctrl-C leaves nothing behind of what this call has started or changed, and leaves
    everything else as it was. A plan for the same nodes as a running deployment to measure
    (`serving up deployment.json`) updates it in place: engines with the same settings keep running.

    Args:
        deployment: what is to run.
        site: where.
        report: receives a line of text about each step.
        plan: plan behind the deployment, if there is one.
        before_start: called with the deployment after all checks, before a first start.

    Raises:
        NegativeAnswer: the deployment cannot be realised there; one reason per line.
        InputError: there is a deployment from this directory or on the cluster already, the port
            is taken, the cluster's token is missing, or the engines cannot have the target's GPUs.
        TargetFailed: it did not become ready, and has been stopped.
    """
    refuse_missing_certificates(os.environ)
    running = _running_here()
    nodes = _live_nodes(deployment, site, report, running)
    labels = None if nodes is None else tuple(node["Labels"] for node in nodes)
    machine = this_machine(site.target.kind, labels)
    deployment, gpus = located(deployment), site.target.gpus
    if gpus:
        refuse_gpus(deployment, gpus, machine)
        machine = replace(machine, num_gpus=len(gpus))  # as the plan numbers them
    _check(deployment, site, machine, running)
    one_host = nodes is None or len({node["NodeManagerAddress"] for node in nodes}) == 1
    if running is None and before_start is not None:
        before_start(deployment)
    workers = max(pool.gpus for pool in deployment.pools)
    state = running or _new_state(site, free_nixl_port(workers) if one_host else NIXL_PORT)
    target = replace(site.target, one_host=one_host, nixl_port=state.nixl_port)
    served = compile_app(deployment, target, plan=plan)
    if gpus:
        nodes_here = (replace(n, gpus=tuple(gpus[at] for at in n.gpus)) for n in served.nodes)
        served = replace(served, nodes=tuple(nodes_here))
    state = replace(
        state,
        base_url=site.base_url,
        tls_cert="" if site.tls is None else site.tls.cert,
        plan_hash=served.endpoint.plan_hash,
        planned=plan is not None,
        slowdown=target.slowdown,
        true_steps=target.truth is not None,
        gpus=gpus,
        deadlines_s=target.deadlines_s,
        token_limit=target.token_limit,
        lora_modules=dict(target.lora_modules),
        ready=False,
    )

    vocab_size = deployment.model.vocab_size
    recorded = partial(record, deployment=deployment, plan=plan)
    try:
        return deploy(served, site, state, record=recorded, vocab_size=vocab_size, report=report)
    except BaseException as failed:
        with uninterrupted():
            # Only what has been recorded has been started, or changed.
            started = read_state()
            if started is not None and started != running:
                report("stopping what was started")
                try:
                    take_down(started)
                except MiniclusterError as error:  # said beside the cause, not in its place
                    failed.add_note(str(error))
        raise


def record(state: State, deployment: Deployment, plan: Plan | None) -> None:
    """Write the state, and beside it the copies with which `serving verify` compares."""
    write_state(state, {PLAN: to_json(plan or deployment), DEPLOYMENT: to_json(deployment)})


def _running_here() -> State | None:
    running = read_state()
    if running is not None and is_gone(running):
        remove_state(running)
        return None
    return running


def _refuse_another(address: str) -> None:
    """Refuse to replace what this directory has not deployed; needs a connection."""
    from ray import serve  # noqa: PLC0415  (seconds to import)

    if APP in serve.status().applications:
        raise InputError(
            "--address",
            address,
            "a Ray cluster on which no other `serving up` has deployed",
            f"`serving down --address {address}` before",
        )


def _check(deployment: Deployment, site: Site, machine: Target, running: State | None) -> None:
    """Refuse an unrealisable deployment, a taken address, and what *running* cannot become."""
    # The memory and cores of running engines would count as taken.
    if running is None and site.target.kind == SIMULATED:
        refuse(simulated_findings(deployment, machine.memory_bytes))
    elif running is None:
        refuse(findings(deployment, machine))
    elif not _can_update(deployment, running, site):
        expectation = "nothing deployed from this directory"
        raise InputError("serving", running.base_url, expectation, "--replace, or `serving down`")
    if site.address is not None and KEYS in os.environ:
        expectation = "no such variable where the cluster is not started here"
        raise InputError(KEYS, SET, expectation, f"set {KEYS_FILE}")
    ours = running is not None and running.base_url == site.base_url
    if not ours and not is_free(site.host, site.port):
        raise InputError(
            "--port", site.port, f"a port of {site.host} that is free", "choose another one"
        )


def _can_update(deployment: Deployment, running: State, site: Site) -> bool:
    if running.planned or not running.ready or site.address not in {None, running.address}:
        return False
    measured = read_deployment(DEPLOYMENT)
    return (
        site.target.kind == running.target
        and site.target.gpus == running.gpus
        and deployment.model == measured.model
        and ray_nodes(deployment, running.target) == ray_nodes(measured, running.target)
        and deployment.routing.policy == measured.routing.policy
    )


def _live_nodes(
    deployment: Deployment, site: Site, report: Callable[[str], None], running: State | None
) -> list[dict[str, Any]] | None:
    """
    Return the nodes of an existing cluster as Ray describes them; `None`: one will be started.

    Nodes that the deployment needs are waited for, as long as *site* allows.

    Raises:
        InputError: something else than *running* is deployed there.
    """
    if site.address is None:
        return None
    import ray  # noqa: PLC0415  (only where a cluster is given)

    from serving.cluster.connection import connected  # noqa: PLC0415

    deadline = time.monotonic() + site.wait_s
    with connected(site.address):
        if running is None:
            _refuse_another(site.address)
        while True:
            alive = [node for node in ray.nodes() if node["Alive"]]
            missing = [*missing_nodes(deployment, tuple(node["Labels"] for node in alive))]
            if not missing or time.monotonic() > deadline:
                return alive
            report(f"waiting for {len(missing)} node(s) of the cluster")
            time.sleep(1)


def take_down(state: State) -> bool:
    """
    Stop what `serving up` started; on a foreign cluster, remove only our application.

    Answers under way may end first (`drain`). Where another directory has replaced the application,
    that one stays. Returns whether anything was running; its record is removed in any case.

    Raises:
        InputError: it has been stopped, but its logs cannot be kept.
        TargetFailed: a process does not end, even after SIGKILL; or no foreign cluster answers.
    """
    if not state.cluster_id and _is_lost(state):
        remove_state(state)
        return False
    if state.ready and (not state.cluster_id or _has_clients(state.base_url)):
        drain(state.address)
    with uninterrupted():
        if state.cluster_id:
            running = bool(cluster_processes(state.cluster_id))
            stop(state.cluster_id)
        else:
            running = remove_application(state.address)
        remove_state(state)
    return running


def _is_lost(state: State) -> bool:
    try:
        return is_replaced(state)
    except TargetFailed as error:
        if state.address.startswith("127."):
            return True
        raise TargetFailed(f"{error} (if it is gone for good, remove {STATE})") from None


def _has_clients(base_url: str) -> bool:
    port = urlsplit(base_url).port
    return any(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in psutil.net_connections("tcp")
    )


def drain(address: str) -> None:
    """
    Have the endpoint on a cluster refuse new requests, and wait for the others to end.

    It waits for `DRAIN_LIMIT_S`, or the drain of the plan's replicas if that is shorter; Ctrl-C,
    or an endpoint that does not run, ends it.
    """
    with suppress(KeyboardInterrupt, MiniclusterError):
        _drain(address)


def _drain(address: str) -> None:
    from ray import serve  # noqa: PLC0415  (seconds to import)
    from ray.exceptions import RayError  # noqa: PLC0415

    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.cluster.serve_compat import NO_REPLICA_ERRORS  # noqa: PLC0415

    with connected(address):
        app = serve.status().applications.get(APP)
        gate = None if app is None else app.deployments.get(GATE)
        if gate is None or not gate.replica_states.get("RUNNING"):
            return  # Serve would hold the call until there is one
        with suppress(RayError, *NO_REPLICA_ERRORS):
            drained = serve.get_deployment_handle(GATE, APP).drain.remote()
            drained.result(timeout_s=DRAIN_LIMIT_S)


def remove_application(address: str) -> bool:
    """
    Delete our application from a shared cluster, and stop Serve if no other one runs.

    Returns:
        Whether it was there.
    """
    from ray import serve  # noqa: PLC0415  (seconds to import)

    from serving.cluster.connection import connected  # noqa: PLC0415

    with connected(address):
        deployed = APP in serve.status().applications
        if deployed:
            serve.delete(APP, _blocking=False)
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while APP in (applications := serve.status().applications):
            if time.monotonic() > deadline:
                raise TargetFailed(f"{APP} is still {applications[APP].status}; the state is kept")
            time.sleep(0.5)
        if not applications:
            serve.shutdown()
    return deployed
