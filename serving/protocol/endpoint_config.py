"""
What the front door and the decode servers know of the plan, as one value.

Compiled in the driver, carried as plain data (`to_plain`), read back at its place (`front_from`).
How `serving.replicas.app` binds the application:

    Ingress.bind(front: dict, servers={domain: handle}, prefill={domain: handle})
    SplitDecodeServer(..., prefill_server=handle, prefill_servers={domain: handle}, domain=str)
    every pool's `user_config`: front, which Serve gives to `reconfigure`

`servers` answer requests: decode pools, or the mixed pools of an aggregated plan, which has no
prefill handles. A domain is what the plan pairs by: GPUs joined by scale-up links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from minicluster.plan import Latency, Plan, StepModel
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Deployment

DEADLINE_FACTOR = 2.0
"""Deadlines of prefill and of the KV hand-off, in planned TTFTs."""

UNPLANNED_DEADLINE_S = 600.0
"""
Deadline where no plan names a TTFT, and the machine's pace is not known yet: a transfer that has
not come by then is lost.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """
    One pool as planned, for people and for limits.

    Attributes:
        replicas: per domain.
        max_batch_size: sequences that one replica decodes at once, all its copies together.
    """

    role: str
    gpu: str
    tp: int
    replicas: dict[str, int]
    max_batch_size: int
    max_batched_tokens: int
    kv_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSlo:
    """
    What the plan promises, and the load it is for.

    Attributes:
        workload: the planned load: rate and lengths.
        capacity_requests_per_s: rate at which the first pool saturates.
        ttft_parts_s: mean TTFT by phase.
        utilisation_fraction: per role.
        confidence: chance that the SLO holds; `None`: not simulated.
    """

    ttft: Latency
    tpot: Latency
    itl: Latency
    e2e: Latency
    workload: WorkloadSpec
    capacity_requests_per_s: float
    ttft_parts_s: dict[str, float]
    utilisation_fraction: dict[str, float]
    confidence: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """
    Everything about the plan that answering requests needs.

    Attributes:
        slo: `None`, as are `promise` and `step_model`, where no plan stands behind.
        prefill_deadline_s: from the call of a prefill replica to its answer.
        kv_wait_deadline_s: from there to the first token.
        local_threshold_tokens: prompts up to this skip the prefill pool.
        fallback: without any live prefill replica, `fail` or `local`.
        policy: replica choice inside a domain, a key of `minicluster.routing.POLICIES`.
        pairing: per domain that answers, the prefill domains in the order in which to try them;
            `()` in an aggregated plan.
        substitutions: what is deployed otherwise than planned, by request.
    """

    model_id: str
    max_model_len: int
    block_size: int
    plan_hash: str
    slo: SloSpec | None
    promise: ServedSlo | None
    step_model: StepModel | None
    prefill_deadline_s: float
    kv_wait_deadline_s: float
    local_threshold_tokens: int
    fallback: str
    policy: str
    pools: tuple[PoolConfig, ...]
    pairing: dict[str, tuple[str, ...]]
    substitutions: tuple[str, ...] = ()

    @property
    def split(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return any(pool.role == "prefill" for pool in self.pools)


def front_door(
    deployment: Deployment,
    *,
    domains: Mapping[str, str],
    plan: Plan | None = None,
    plan_hash: str = "",
    substitutions: tuple[str, ...] = (),
    deadlines_s: tuple[float | None, float | None] = (None, None),
) -> EndpointConfig:
    """
    Take from the plan what answering requests needs.

    Args:
        deployment: what is to run.
        domains: per node of the placement, its domain.
        plan: the plan behind it, if there is one.
        plan_hash: of the plan's file.
        substitutions: what is deployed otherwise than planned.
        deadlines_s: of prefill and of the KV hand-off; `None`: twice the plan's TTFT.
    """
    pools = tuple(
        PoolConfig(
            role=pool.role,
            gpu=pool.gpu,
            tp=pool.tp,
            replicas=replicas_by_domain(pool, domains),
            max_batch_size=pool.max_batch_size * pool.lanes // pool.replicas,
            max_batched_tokens=pool.max_batched_tokens,
            kv_bytes=pool.kv_bytes,
        )
        for pool in deployment.pools
    )
    prefill_deadline_s, kv_deadline_s = deadlines(plan, deadlines_s)
    routing = deployment.routing
    return EndpointConfig(
        model_id=deployment.model.id,
        max_model_len=deployment.engine.max_model_len,
        block_size=deployment.engine.block_size,
        plan_hash=plan_hash,
        slo=None if plan is None else plan.slo,
        promise=None if plan is None else _promise(plan),
        step_model=None if plan is None else plan.step_model,
        prefill_deadline_s=prefill_deadline_s,
        kv_wait_deadline_s=kv_deadline_s,
        local_threshold_tokens=routing.local_threshold_tokens,
        fallback=routing.fallback,
        policy=routing.policy,
        pools=pools,
        pairing=_pairing(pools),
        substitutions=substitutions,
    )


def deadlines(plan: Plan | None, given_s: tuple[float | None, float | None]) -> tuple[float, float]:
    """Return the deadlines of prefill and of the KV hand-off, seconds: as given, or the plan's."""
    planned_s = UNPLANNED_DEADLINE_S if plan is None else DEADLINE_FACTOR * plan.slo.ttft_s
    return given_s[0] or planned_s, given_s[1] or planned_s


def replicas_by_domain(pool: Any, domains: Mapping[str, str]) -> dict[str, int]:  # noqa: ANN401
    """Count the replicas of a pool in each domain; one wider than a domain is in its first."""
    width = pool.gpus // pool.replicas
    flat = [domains[each.node] for each in pool.placement for _ in each.gpus]
    counted: dict[str, int] = {}
    for start in range(0, len(flat), width):
        counted[flat[start]] = counted.get(flat[start], 0) + 1
    return counted


def _pairing(pools: tuple[PoolConfig, ...]) -> dict[str, tuple[str, ...]]:
    """Return the prefill domains for each domain that answers: its own first, then the others."""
    prefill = [domain for pool in pools if pool.role == "prefill" for domain in pool.replicas]
    return {
        domain: tuple(sorted(prefill, key=lambda each: (each != domain, each)))
        for pool in pools
        if pool.role != "prefill"
        for domain in pool.replicas
    }


def _promise(plan: Plan) -> ServedSlo:
    """Return the plan's prediction and load."""
    said = plan.prediction
    return ServedSlo(
        ttft=said.ttft,
        tpot=said.tpot,
        itl=said.itl,
        e2e=said.e2e,
        workload=plan.workload,
        capacity_requests_per_s=said.capacity_requests_per_s,
        ttft_parts_s=said.ttft_parts_s,
        utilisation_fraction=said.utilisation_fraction,
        confidence=None if plan.confidence is None else plan.confidence.fraction,
    )


def to_plain(front: EndpointConfig) -> dict[str, Any]:
    """Return *front* as dicts, lists, strings and numbers."""
    plain: dict[str, Any] = _ADAPTER.dump_python(front, mode="json")
    return plain


def front_from(plain: Mapping[str, Any]) -> EndpointConfig:
    """Read back what `to_plain` wrote; raises pydantic's ValidationError on anything else."""
    return _ADAPTER.validate_json(_JSON.dump_json(dict(plain)))


_ADAPTER = TypeAdapter(EndpointConfig)
_JSON = TypeAdapter(dict[str, Any])
