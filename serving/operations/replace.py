"""`serving up --replace`: another plan for what runs, whose clients see no failed request."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minicluster.command import uninterrupted
from minicluster.errors import Fault, InputError, TargetFailed
from minicluster.plan import NODE_LABEL, ROLE_LABEL, read_deployment
from serving.cluster.local_cluster import token_file
from serving.cluster.ports import NIXL_PORT, NIXL_PORTS, free_nixl_port
from serving.cluster.processes import environment, raylet_gpus
from serving.cluster.raylets import join_nodes
from serving.cluster.state import DEPLOYMENT
from serving.deployment.compile import compile_app, kind_of, ray_nodes
from serving.deployment.engine_args import SIMULATED
from serving.deployment.feasibility import findings, refuse
from serving.deployment.simulated import simulated_findings
from serving.deployment.target import this_machine
from serving.operations.deploy import load, record, run_application, wait_until_running
from serving.operations.scale import cluster_id_of, device_kind, retire, role_nodes
from serving.operations.status import by_role, is_gone, running_app
from serving.protocol.app_spec import APP, GATE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from minicluster.plan import Deployment, Plan
    from serving.cluster.state import State
    from serving.deployment.engine_args import DeployTarget
    from serving.operations.probe import Readiness
    from serving.protocol.app_spec import RayNode, ServedApp

WAY_OUT = "`serving down`, then `serving up`"

PREPARE_TRIES = 3
"""Requests through every domain that may fail before the new replicas are given up."""

SWITCH_LIMIT_S = 60.0
"""Longest time for the endpoint to take the new plan; it takes a second."""

RELEASE_LIMIT_S = 10.0
"""Longest time for Ray to count the devices of replicas that have ended as free."""

END_MARGIN_S = 30.0
"""Time for a replica's process to end, beyond its drain."""


def refuse_changes(running: State, given: Mapping[str, object]) -> None:
    """
    Refuse options of `serving up` that differ from what runs, which another plan cannot change.

    Raises:
        InputError: *given*, options by name, has one.
    """
    at = urlsplit(running.base_url)
    kept = {
        "--host": at.hostname,
        "--port": at.port,
        "--address": running.address,
        "--engine": SIMULATED if running.target == SIMULATED else "vllm",
        "--slowdown": running.slowdown,
        "MINICLUSTER_MAX_OUTPUT_TOKENS": running.token_limit,
    }
    for name, value in given.items():
        if name not in kept:
            raise InputError(name, "given", f"no {name} with --replace", WAY_OUT)
        if value != kept[name]:
            raise InputError(name, value, f"{kept[name]} as it runs, with --replace", WAY_OUT)


def refuse_replacement(running: State, deployment: Deployment) -> None:
    """
    Refuse what cannot take the place of *running*.

    Raises:
        InputError: another model, or other devices.
        TargetFailed: what runs has ended, or has never been ready.
    """
    if is_gone(running) or not running.ready:
        raise TargetFailed(f"the deployment at {running.base_url} is not up ({WAY_OUT})")
    if running.true_steps:
        fault = Fault("has engines with the step times of --step-times")
        raise InputError(running.base_url, fault, "one with the plan's step times", WAY_OUT)
    served = read_deployment(DEPLOYMENT).model.id
    if deployment.model.id != served:
        expected = f"{served}, which clients of {running.base_url} name"
        raise InputError("model.id", deployment.model.id, expected, WAY_OUT)
    if running.target not in {SIMULATED, kind_of(deployment)}:
        raise InputError("plan", kind_of(deployment), f"a plan for {running.target}", WAY_OUT)


def replace_plan(
    deployment: Deployment,
    running: State,
    target: DeployTarget,
    *,
    plan: Plan | None,
    report: Callable[[str], None],
) -> tuple[State, Readiness]:
    """
    Start the replicas of another plan beside those that run, switch to them, and remove the former.

    A failure before the switch, or Ctrl-C, removes the new replicas, and the former plan
    serves on. After it the new plan serves, and Ctrl-C ends the wait for answers in flight.

    Args:
        deployment: what is to run.
        running: what runs, which `refuse_replacement` accepted.
        target: as *running*; ports, number of hosts and generation are found out.
        plan: plan behind the deployment, if there is one.
        report: receives a line of text about each step.

    Raises:
        NegativeAnswer: there is no room beside the replicas that run; one reason per line.
        TargetFailed: the new replicas did not become ready.
    """
    # Imported here because they take seconds.
    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.replicas.app import endpoint_settings  # noqa: PLC0415

    load(target.kind, report)
    with connected(running.address):
        target = _beside(deployment, replace(target, generation=running.generation + 1))
        started = _room(deployment, running, target)
        served = compile_app(deployment, target, plan=plan)
        former, settings = _serving(running), endpoint_settings(served)
        names = {pool.name for pool in served.pools}
        roles = {node.role for node in started}
        if running.cluster_id:  # else other raylets without work may be spares
            roles = {pool.role for pool in (*deployment.pools, *read_deployment(DEPLOYMENT).pools)}
        state = replace(
            running,
            plan_hash=served.endpoint.plan_hash,
            planned=plan is not None,
            deadlines_s=target.deadlines_s,
            lora_modules=dict(target.lora_modules),
            nixl_port=target.nixl_port,
            generation=target.generation,
            changes=(),
        )
        switched = False
        try:
            _start(running, started, report)
            _run_beside(served, former[0], running, report)
            readiness = _probed(served, deployment.model.vocab_size, settings, report)
            with uninterrupted():
                report("switching to the new replicas")
                _switch([*former[0], *names], settings)
                record(state, deployment, plan)
                switched = True
            _drain(former[1], report)
        finally:
            with uninterrupted():
                if switched:
                    report("removing the former replicas")
                    _keep(names, former[0], settings, former[1]["drain_s"])
                else:
                    report("removing the new replicas; the running plan serves on")
                    _keep(former[0], names, former[1], settings["drain_s"])
                _retire(running, roles, served.nodes, kept=switched)
    return state, readiness


def _beside(deployment: Deployment, target: DeployTarget) -> DeployTarget:
    """Return *target* with ports for KV transfers that the replicas that run do not have."""
    import ray  # noqa: PLC0415

    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(hosts) == 1:
        workers = max(pool.gpus for pool in deployment.pools)
        return replace(target, one_host=True, nixl_port=free_nixl_port(workers))
    # No host can ask the others: generations take turns.
    half = NIXL_PORT + (target.generation + 1) % 2 * NIXL_PORTS // 2
    return replace(target, one_host=False, nixl_port=half)


def _room(deployment: Deployment, running: State, target: DeployTarget) -> list[RayNode]:
    import ray  # noqa: PLC0415

    labels = tuple(node["Labels"] for node in ray.nodes() if node["Alive"])
    machine = this_machine(target.kind, None if running.cluster_id else labels)
    if target.kind == SIMULATED:
        refuse(simulated_findings(deployment, machine.memory_bytes))
        return []
    needed = ray_nodes(deployment, target.kind, target.generation)
    lacking = [node for node in needed if not _is_free(running, node)]
    reasons = [*findings(deployment, machine), *_held(running, lacking)]
    if reasons:
        reasons.append(f"(beside what runs; without it: {WAY_OUT})")
    refuse(reasons)
    return lacking


def _is_free(running: State, node: RayNode) -> bool:
    kind = device_kind(running)
    free = sum(
        int(free.get(kind, 0))
        for raylet, free in role_nodes(running, node.role)
        if raylet["Labels"].get(NODE_LABEL) == node.node
    )
    return free >= len(node.cores or node.gpus)


def _held(running: State, lacking: list[RayNode]) -> Iterator[str]:
    cluster_id = cluster_id_of(running)
    taken = raylet_gpus(cluster_id) if cluster_id and running.target == "gpu" else set()
    for node in lacking:
        if not cluster_id:
            labels = f"{ROLE_LABEL}={node.role}, {NODE_LABEL}={node.node}"
            yield f"placement: {len(node.cores or node.gpus)} devices are not free at {labels}"
        elif held := sorted(taken.intersection(node.gpus)):
            yield f"placement: GPUs {held} have replicas that run"


def _start(running: State, nodes: list[RayNode], report: Callable[[str], None]) -> None:
    if nodes:
        report(f"starting {len(nodes)} raylet(s)")
        token = token_file(running.address)
        assert token is not None  # noqa: S101  (a cluster of ours, by `_held`)
        variables = environment(cluster_id_of(running), token)
        join_nodes(nodes, variables, address=running.address)


def _serving(running: State) -> tuple[list[str], dict[str, Any]]:
    from serving.cluster.serve_compat import running_deployment  # noqa: PLC0415

    deployments = by_role(dict(running_app().deployments), running.generation)
    names = [name for by_name in deployments.values() for name in by_name]
    settings: dict[str, Any] = running_deployment(APP, GATE).user_config
    return names, settings


def _run_beside(
    served: ServedApp, former: Collection[str], running: State, report: Callable[[str], None]
) -> None:
    from serving.replicas.app import bind_pools, changed_app  # noqa: PLC0415

    run_application(changed_app(APP, former, bind_pools(served)))
    wait_until_running(served, running.logs, report)


def _probed(
    served: ServedApp, vocab_size: int, settings: dict[str, Any], report: Callable[[str], None]
) -> Readiness:
    """Have every pair of new replicas answer, and then the endpoint's own requests to them."""
    from serving.operations.probe import probe_pairs  # noqa: PLC0415

    rng = random.Random(time.time_ns())  # noqa: S311  (prompts that no prefix cache has)
    readiness, limit_s = probe_pairs(served, vocab_size, rng, report)
    report("sending requests from the endpoint to the new replicas")
    lacking: list[str] = []
    for _ in range(PREPARE_TRIES):
        lacking = _ask_endpoint(limit_s, "prepare", settings)
        if not lacking:
            return readiness
    raise TargetFailed("; ".join(lacking))


def _switch(names: Collection[str], settings: dict[str, Any]) -> None:
    from serving.replicas.app import changed_app  # noqa: PLC0415

    run_application(changed_app(APP, names, (), settings))
    deadline = time.monotonic() + SWITCH_LIMIT_S
    while _ask_endpoint(SWITCH_LIMIT_S, "serves") != settings["servers"]:
        if time.monotonic() > deadline:
            raise TargetFailed(f"the endpoint has not taken the plan in {SWITCH_LIMIT_S:g} s")
        time.sleep(0.1)


def _drain(former: dict[str, Any], report: Callable[[str], None]) -> None:
    report("waiting for answers of the former replicas")
    with suppress(TargetFailed):  # an endpoint that has ended has no requests
        requests = _ask_endpoint(former["drain_s"] + END_MARGIN_S, "drain_former")
        if requests:
            report(f"{requests} answers have not ended in {former['drain_s']:g} s")


def _keep(
    names: Collection[str], gone: Collection[str], settings: dict[str, Any], drain_s: float
) -> None:
    """Remove the deployments *gone*, and wait until their replicas have ended."""
    from ray.util import list_named_actors  # noqa: PLC0415

    from serving.replicas.app import changed_app  # noqa: PLC0415

    run_application(changed_app(APP, names, (), settings))
    deadline = time.monotonic() + drain_s + END_MARGIN_S
    marks = tuple(f"{APP}#{name}#" for name in gone)
    while any(
        mark in actor["name"] for actor in list_named_actors(all_namespaces=True) for mark in marks
    ):
        if time.monotonic() > deadline:
            raise TargetFailed(f"replicas of {', '.join(sorted(gone))} do not end")
        time.sleep(0.2)


def _retire(
    running: State, roles: Collection[str], nodes: Collection[RayNode], *, kept: bool
) -> None:
    deadline = time.monotonic() + RELEASE_LIMIT_S
    while roles and time.monotonic() < deadline:
        for role in roles:
            retire(running, role)
        raylets = [node for role in roles for node, _ in role_nodes(running, role)]
        others = [node for node in raylets if "node:__internal_head__" not in node["Resources"]]
        is_new = [
            any(new.labels.items() <= node["Labels"].items() for new in nodes) for node in others
        ]
        if all(new == kept for new in is_new):
            return
        time.sleep(0.5)  # a device counts as free a moment after its replica has ended


def _ask_endpoint(limit_s: float, method: str, *given: object) -> Any:  # noqa: ANN401
    """Return what a method of the gate returns; raises TargetFailed if it does not answer."""
    from ray import serve  # noqa: PLC0415
    from ray.exceptions import RayError  # noqa: PLC0415

    from serving.cluster.serve_compat import NO_REPLICA_ERRORS  # noqa: PLC0415

    call = getattr(serve.get_deployment_handle(GATE, APP), method).remote(*given)
    try:
        return call.result(timeout_s=limit_s)
    except (RayError, *NO_REPLICA_ERRORS) as error:
        raise TargetFailed(f"the endpoint does not answer: {error!r}") from None
