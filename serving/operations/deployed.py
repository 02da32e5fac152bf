"""A deployment for the duration of a block: what measurements and tests run against."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan import read_deployment
from serving.api.api_keys import KEYS, KEYS_FILE
from serving.cluster.ports import NIXL_PORT, free_nixl_port, is_free
from serving.cluster.state import State, forget, read_state
from serving.cluster.token import refuse_missing_certificates
from serving.deployment.compile import compile_app, ray_nodes
from serving.deployment.cpu_fallback import substituted
from serving.deployment.engine_args import DeployTarget
from serving.deployment.feasibility import findings, missing_nodes, refuse
from serving.deployment.target import located, this_machine
from serving.operations.deploy import Site, deploy, new_state
from serving.operations.down import take_down
from serving.operations.status import is_gone
from serving.protocol.phases import Readiness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from minicluster.plan import Deployment, Plan
    from serving.deployment.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A deployment that is up; `base_url` has no slash at its end."""

    base_url: str
    model_id: str
    readiness: Readiness
    state: State


def bring_up(  # noqa: PLR0913  (what is deployed, where, and what is said of it)
    deployment: Deployment,
    site: Site,
    *,
    told: Callable[[str], None],
    plan: Plan | None = None,
    substitute: bool = False,
    decode_engine_kwargs: Mapping[str, Any] | None = None,
    before_start: Callable[[Deployment], None] | None = None,
) -> Endpoint:
    """
    Check, compile and deploy; returns when ready.

    Over a deployment that is up to be measured (`serving up deployment.json`) a plan for the same
    nodes is laid in place: engines with the same settings run on.

    Args:
        deployment: what is to run.
        site: where.
        told: is told, for people, what is going on.
        plan: the plan behind the deployment, if there is one.
        substitute: deploy what of it this CPU holds, and record every change.
        decode_engine_kwargs: further vLLM arguments of the decode pool; tests plant faults there.
        before_start: is given what is deployed, once nothing stands in the way and if nothing runs
            yet.

    Raises:
        NegativeAnswer: the deployment cannot be realised there; every reason in a line.
        InputError: something is deployed from here already, the port is taken, or there is no
            token of that cluster.
        TargetFailed: it was started and did not get ready; nothing is left of it.
    """
    raylets = _raylets(deployment, site, told)
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
            target=site.target,
            one_host=one_host,
            nixl_port=state.nixl_port,
            decode_engine_kwargs=decode_engine_kwargs or {},
            deadlines_s=site.deadlines_s,
            token_limit=site.token_limit,
        ),
        plan=plan,
        substitutions=changes,
    )
    state, readiness = deploy(
        served,
        site,
        state,
        deployment=deployment,
        plan=plan,
        told=told,
    )
    return Endpoint(
        base_url=state.base_url, model_id=served.model_id, readiness=readiness, state=state
    )


def _check(deployment: Deployment, site: Site, target: Target) -> State | None:
    """
    Refuse what cannot be realised and a place that is taken; clear what is left of the dead.

    Returns:
        The deployment that runs here to be measured, if this one can be laid over it.
    """
    refuse_missing_certificates(os.environ)
    running = read_state()
    if running is not None and is_gone(running):
        forget(running)
        running = None
    # What the running engines hold of memory and cores is theirs already.
    if running is None:
        refuse(findings(deployment, target))
    elif not _fits_over(deployment, running, site):
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


def _fits_over(deployment: Deployment, running: State, site: Site) -> bool:
    """Tell whether what runs is there to be measured, on the same nodes and routed alike."""
    if running.planned or not running.ready or site.address not in {None, running.address}:
        return False
    measured = read_deployment(Path(running.deployment))
    return (
        site.target == running.target
        and deployment.model == measured.model
        and ray_nodes(deployment, site.target) == ray_nodes(measured, site.target)
        and deployment.routing.policy == measured.routing.policy
    )


@contextmanager
def deployed(
    deployment: Deployment,
    site: Site,
    *,
    told: Callable[[str], None] = lambda _text: None,
    plan: Plan | None = None,
    decode_engine_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Endpoint]:
    """Have *deployment* up for the duration of the block; raises as `bring_up` does."""
    endpoint = bring_up(
        deployment, site, told=told, plan=plan, decode_engine_kwargs=decode_engine_kwargs
    )
    try:
        yield endpoint
    finally:
        take_down(endpoint.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raylet:
    """A node of an existing cluster."""

    address: str
    labels: dict[str, str]


def _raylets(
    deployment: Deployment, site: Site, told: Callable[[str], None]
) -> tuple[_Raylet, ...] | None:
    """Return the nodes of an existing cluster, once all are there; `None`: there is none yet."""
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
            told(f"waiting for {len(missing)} node(s) of the cluster")
            time.sleep(1)
