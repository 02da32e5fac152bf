"""A deployment for the duration of a block: what measurements and tests run against."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.cluster import free_nixl_port, is_free
from serving.compile import compile_app
from serving.deploy import Site, deploy
from serving.engine import NIXL_PORT, Ground
from serving.phases import Readiness
from serving.state import State, read_state
from serving.takedown import take_down
from serving.target import located, this_machine
from serving.validate import findings
from sizing.errors import InputError, NegativeAnswer
from sizing.plan import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sizing.plan import Deployment, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A deployment that is up; `base_url` has no slash at its end."""

    base_url: str
    model_id: str
    readiness: Readiness
    state: State


def bring_up(
    deployment: Deployment,
    site: Site,
    *,
    told: Callable[[str], None],
    plan: Plan | None = None,
    decode_engine_kwargs: Mapping[str, Any] | None = None,
) -> Endpoint:
    """
    Check, compile and deploy; returns when ready.

    Args:
        deployment: what is to run.
        site: where.
        told: is told, for people, what is going on.
        plan: the plan behind the deployment, if there is one.
        decode_engine_kwargs: further vLLM arguments of the decode pool; tests plant faults there.

    Raises:
        NegativeAnswer: the deployment cannot be realised there; every reason in a line.
        InputError: something is deployed from here already, or the port is taken.
        TargetFailed: it was started and did not get ready; nothing is left of it.
    """
    deployment = located(deployment)
    reasons = findings(deployment, this_machine(site.target, _labels(site.address)))
    if reasons:
        raise NegativeAnswer("\n  ".join(["this deployment cannot be realised here:", *reasons]))
    running = read_state()
    if running is not None:
        raise InputError(
            "serving", running.base_url, "nothing deployed from this directory", "`serving down`"
        )
    if not is_free(site.host, site.port):
        raise InputError(
            "--port", site.port, f"a port of {site.host} that is free", "choose another one"
        )
    served = compile_app(
        deployment,
        Ground(
            target=site.target,
            one_host=site.address is None,
            nixl_port=_nixl_port(deployment, site),
            decode_engine_kwargs=decode_engine_kwargs or {},
        ),
        plan=plan,
    )
    state, readiness = deploy(
        served,
        site,
        plan=to_json(plan or deployment),
        vocab_size=deployment.architecture.vocab_size,
        told=told,
    )
    return Endpoint(
        base_url=state.base_url, model_id=served.model_id, readiness=readiness, state=state
    )


@contextmanager
def deployed(
    deployment: Deployment,
    site: Site,
    *,
    told: Callable[[str], None] = lambda _text: None,
    decode_engine_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Endpoint]:
    """Have *deployment* up for the duration of the block; raises as `bring_up` does."""
    endpoint = bring_up(deployment, site, told=told, decode_engine_kwargs=decode_engine_kwargs)
    try:
        yield endpoint
    finally:
        take_down(endpoint.state)


def _nixl_port(deployment: Deployment, site: Site) -> int:
    """Return ports that are free here; on another's cluster, the usual ones."""
    if site.address is not None:
        return NIXL_PORT
    return free_nixl_port(max(pool.gpus for pool in deployment.pools))


def _labels(address: str | None) -> tuple[dict[str, str], ...] | None:
    """Return the labels of the nodes of an existing cluster."""
    if address is None:
        return None
    import ray  # noqa: PLC0415  (only where a cluster is given)

    from serving.connection import connected  # noqa: PLC0415

    with connected(address):
        return tuple(node["Labels"] for node in ray.nodes() if node["Alive"])
