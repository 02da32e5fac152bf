"""Start what a compiled plan says, and wait until it works."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import TargetFailed
from minicluster.files import write_atomically
from minicluster.plan import to_json
from serving.cluster.local_cluster import read_cluster
from serving.cluster.log_errors import why
from serving.cluster.raylets import new_session, start_nodes
from serving.cluster.state import HOME, TOKEN, State, write_state
from serving.deployment.compile import plan_hash
from serving.operations.down import take_down
from serving.protocol.app_spec import APP

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Deployment, Plan
    from serving.protocol.app_spec import ServedApp
    from serving.protocol.phases import Readiness

START_LIMIT_S = 900.0
"""Loading weights of hundreds of gigabytes takes minutes; beyond this it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """
    Where to deploy, and how patiently.

    Attributes:
        target: `cpu` or `gpu`.
        host: address the endpoint listens on.
        port: likewise.
        address: of an existing Ray cluster; `None` starts one here.
        wait_s: how long to wait for that cluster's nodes.
        deadlines_s: of prefill and of the KV hand-off; `None`: the plan's.
        token_limit: most tokens of one answer; `None`: what the context leaves.
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
        """Of the endpoint."""
        return f"http://{self.host}:{self.port}"


def deploy(
    served: ServedApp,
    site: Site,
    state: State,
    *,
    deployment: Deployment,
    plan: Plan | None,
    told: Callable[[str], None],
) -> tuple[State, Readiness]:
    """
    Deploy and wait until ready; on a failure or Ctrl-C leave nothing behind.

    Args:
        served: what to start.
        site: where.
        state: `new_state`, or that of a deployment on the same nodes, which is updated in place:
            Ray Serve keeps the replicas whose engines are the same.
        deployment: what *served* was compiled from, kept beside the state for `serving verify`.
        plan: the plan behind it, kept likewise.
        told: is told, for people, what is going on.

    Raises:
        TargetFailed: Ray or an engine did not start, or requests do not get through.
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
                told=told,
            )
            state = replace(state, address=address)
            write_state(state)
        readiness = _serve(served, site, state, deployment.model.vocab_size, told)
    except BaseException:
        told("stopping what was started")
        take_down(state)
        raise
    state = replace(state, ready=True)
    write_state(state)
    return state, readiness


def new_state(site: Site, nixl_port: int) -> State:
    """Return the state before anything is started."""
    own = site.address is None
    cluster = read_cluster()
    session = cluster.session if cluster is not None and cluster.address == site.address else ""
    return State(
        cluster_id=secrets.token_hex(8) if own else "",
        address=site.address or "",
        base_url="",
        target=site.target,
        plan=str(HOME / "plan.json"),
        plan_hash="",
        deployment=str(HOME / "deployment.json"),
        session=str(new_session()) if own else session,
        instance="" if site.address is None else _instance(site.address),
        nixl_port=nixl_port,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _described(
    state: State, served: ServedApp, site: Site, deployment: Deployment, plan: Plan | None
) -> State:
    """Return *state* with what is to be deployed now, and keep plan and deployment beside it."""
    text = to_json(plan or deployment)
    HOME.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(state.plan), text)
    write_atomically(Path(state.deployment), to_json(deployment))
    return replace(
        state,
        base_url=site.base_url,
        plan_hash=plan_hash(text),
        planned=plan is not None,
        changes=served.front.substitutions,
        deadlines_s=site.deadlines_s,
        token_limit=site.token_limit,
        ready=False,
    )


def _instance(address: str) -> str:
    """Return which start of a cluster it is that runs there now."""
    from serving.cluster.connection import instance_of  # noqa: PLC0415  (a second to import)

    return instance_of(address)


def _serve(
    served: ServedApp, site: Site, state: State, vocab_size: int, told: Callable[[str], None]
) -> Readiness:
    """Run the application on the cluster."""
    told("loading Ray Serve and vLLM")
    # They tell the terminal what is in their logs; a person here wants to know what we tell.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Seconds to import, so only here: `serving down` and `serving status` do without.
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
        _wait_until_running(served, state.logs, told)
        return wait_until_ready(served, base_url=site.base_url, vocab_size=vocab_size, told=told)


def _wait_until_running(served: ServedApp, logs: Path, told: Callable[[str], None]) -> None:
    """Wait for every replica, or say why one does not come."""
    from ray import serve  # noqa: PLC0415

    deadline = time.monotonic() + START_LIMIT_S
    while True:
        status = serve.status().applications.get(APP)
        if status is not None and status.status == "RUNNING":
            return
        if status is not None and status.status in {"DEPLOY_FAILED", "UNHEALTHY"}:
            messages = [each.message for each in status.deployments.values()]
            raise TargetFailed(why(logs, "\n".join([*messages, status.message])))
        if time.monotonic() > deadline:
            raise TargetFailed(
                f"not up after {START_LIMIT_S:.0f} s: {why(logs, 'no error logged')}"
            )
        up = {
            name: each.replica_states.get("RUNNING", 0)
            for name, each in (status.deployments.items() if status is not None else ())
        }
        told(
            "starting engines: "
            + ", ".join(
                f"{p.prefix[:-1].lower()} {up.get(p.name, 0)} of {p.replicas}" for p in served.pools
            )
        )
        time.sleep(0.5)
