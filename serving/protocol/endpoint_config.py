"""
The part of the plan that the endpoint and the decode servers need, as one frozen value.

`endpoint_config` takes it from the plan in the driver; it travels as plain data (`to_plain`,
`from_plain`). How `serving.replicas.app` binds the application:

    Ingress.bind(settings, pools=...), and its `user_config`: `endpoint_settings`, with this config
        and the deployments `servers` and `prefill` by domain
    every pool's `user_config`: this config; Serve passes either to `reconfigure`

`servers` answer requests: decode pools, or the mixed pools of an aggregated plan, which has no
prefill pools. A domain is what the plan pairs by: GPUs joined by scale-up links.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from minicluster.engine_model.planned_limits import planned_limits
from minicluster.plan import Plan, Prediction, Routing, StepModel
from minicluster.routing import ANSWER_POLICY, find_policy, pool_policy
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Deployment, Pool

DEADLINE_FACTOR = 2.0
"""The deadlines of prefill and of the KV hand-off, as multiples of the SLO's TTFT."""

UNPLANNED_DEADLINE_S = 600.0
"""
Either deadline where no plan names a TTFT. The speed of the machine is not known yet, so the limit
only catches transfers that never arrive.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """
    One planned pool, its replicas counted by domain.

    Attributes:
        max_num_seqs: sequences that one replica decodes at once, all its copies together.
        max_num_batched_tokens: token budget of one step.
        kv_bytes: KV cache per GPU.
        policy: how one of its replicas is chosen (`minicluster.routing`).
        cached_tokens: prompt tokens that a replica's prefix cache has room for.
        max_ongoing_requests: that a replica has at once; as many wait for each.
    """

    role: str
    gpu: str
    tp: int
    replicas: dict[str, int]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: float
    policy: str = ANSWER_POLICY
    cached_tokens: int = 0
    max_ongoing_requests: int

    @property
    def sequences(self) -> int:
        """Sequences that all replicas decode at once."""
        return self.max_num_seqs * sum(self.replicas.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngines:
    """
    What tells simulated engines from real ones.

    Attributes:
        slowdown: seconds that each second of the plan takes.
        text_tokens: how text is counted: by which tokenizer, or bytes for each token.
    """

    slowdown: float
    text_tokens: str

    def __str__(self) -> str:
        """Say it in one line, fit for a header."""
        return f"simulated; slowdown={self.slowdown:g}; text-tokens={self.text_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """
    Everything about the plan that answering requests needs.

    Attributes:
        slo: like the next four `None` for a deployment without a plan.
        confidence_fraction: probability that the SLO holds; `None`: not simulated.
        tokens_per_step: that a sequence gets of a decode step on average; above 1 with drafts.
        prefill_deadline_s: limit from the call of a prefill replica to its answer.
        kv_wait_deadline_s: limit from there to the first token.
        pairing: per domain that answers, the prefill domains in the order in which to try them;
            `()` in an aggregated plan.
        adapters: names of LoRA adapters, which requests name as their model.
        vocab_size: of the model; token ids of requests are below it.
        simulated: simulated engines, with whose seconds all times here are; `None`: real ones.
    """

    model_id: str
    max_model_len: int
    block_size: int
    plan_hash: str
    slo: SloSpec | None = None
    prediction: Prediction | None = None
    workload: WorkloadSpec | None = None
    confidence_fraction: float | None = None
    step_model: StepModel | None = None
    prefill_deadline_s: float
    kv_wait_deadline_s: float
    routing: Routing
    pools: tuple[PoolConfig, ...]
    pairing: dict[str, tuple[str, ...]]
    simulated: SimulatedEngines | None = None
    tokens_per_step: float
    adapters: tuple[str, ...] = ()
    vocab_size: int = 2**31

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may give as their model: the model's and those of adapters."""
        return self.model_id, *self.adapters

    @property
    def split(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return any(pool.role == "prefill" for pool in self.pools)

    @property
    def answering(self) -> PoolConfig:
        """The pool that answers requests: decode, or the mixed pool of an aggregated plan."""
        return next(pool for pool in self.pools if pool.role != "prefill")

    @property
    def prefilling(self) -> PoolConfig:
        """The pool that computes prompts: prefill, or the mixed pool of an aggregated plan."""
        return next((pool for pool in self.pools if pool.role == "prefill"), self.answering)

    def prefill_domain(self, domain: str) -> str:
        """Return the prefill domain that requests answered in *domain* use first."""
        return (self.pairing.get(domain) or (domain,))[0]


def endpoint_config(  # noqa: PLR0913  (what an endpoint is told, by name)
    deployment: Deployment,
    *,
    domains: Mapping[str, str],
    ongoing: Mapping[str, int],
    plan: Plan | None = None,
    plan_hash: str = "",
    simulated: SimulatedEngines | None = None,
    deadlines_s: tuple[float | None, float | None] = (None, None),
    adapters: tuple[str, ...] = (),
) -> EndpointConfig:
    """
    Take from the plan what answering requests needs.

    Args:
        deployment: what is to run.
        domains: the domain of each node of the placement.
        ongoing: by role, the requests that a replica has at once.
        plan: the plan behind the deployment, if there is one.
        plan_hash: of the plan's file.
        simulated: simulated engines, if the pools have them.
        deadlines_s: of prefill and of the KV hand-off; `None`: twice the SLO's TTFT.
        adapters: names of LoRA adapters.
    """
    pools = tuple(
        PoolConfig(
            role=pool.role,
            gpu=pool.gpu,
            tp=pool.tp,
            replicas=engines_by_domain(pool, domains),
            max_num_seqs=pool.max_num_seqs * pool.pp,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            kv_bytes=pool.kv_bytes,
            policy=(policy := pool_policy(pool.role, deployment.routing.policy)),
            cached_tokens=planned_limits(deployment, pool).max_tokens
            if find_policy(policy).by_prefix
            else 0,
            max_ongoing_requests=ongoing[pool.role],
        )
        for pool in deployment.pools
    )
    prefill_deadline_s, kv_deadline_s = deadlines(plan, deadlines_s)
    return EndpointConfig(
        model_id=deployment.model.id,
        max_model_len=deployment.engine.max_model_len,
        block_size=deployment.engine.block_size,
        plan_hash=plan_hash,
        slo=plan.slo if plan else None,
        prediction=plan.prediction if plan else None,
        workload=plan.workload if plan else None,
        confidence_fraction=plan.confidence.fraction if plan and plan.confidence else None,
        step_model=plan.step_model if plan else None,
        prefill_deadline_s=prefill_deadline_s,
        kv_wait_deadline_s=kv_deadline_s,
        routing=deployment.routing,
        pools=pools,
        pairing=_pairing(pools),
        simulated=simulated,
        tokens_per_step=1.0 + deployment.engine.mean_accepted_tokens,
        adapters=adapters,
        vocab_size=deployment.model.vocab_size,
    )


def deadlines(
    plan: Plan | None, overrides_s: tuple[float | None, float | None]
) -> tuple[float, float]:
    """Return the deadlines of prefill and of the KV hand-off, seconds: overridden or planned."""
    planned_s = UNPLANNED_DEADLINE_S if plan is None else DEADLINE_FACTOR * plan.slo.ttft_s
    return overrides_s[0] or planned_s, overrides_s[1] or planned_s


def engines_by_domain(pool: Pool, domains: Mapping[str, str]) -> dict[str, int]:
    """
    Count the engines of a pool in each domain; Ray Serve calls them replicas.

    The copies of attention of one replica are one group, which counts where its first GPU is.
    """
    width = pool.gpus // pool.replicas
    flat = [domains[each.node] for each in pool.placement for _ in each.gpus]
    groups = Counter(flat[::width])
    return {domain: pool.dp * number for domain, number in groups.items()}


def _pairing(pools: tuple[PoolConfig, ...]) -> dict[str, tuple[str, ...]]:
    prefill = [domain for pool in pools if pool.role == "prefill" for domain in pool.replicas]
    return {
        domain: tuple(sorted(prefill, key=lambda each: (each != domain, each)))
        for pool in pools
        if pool.role != "prefill"
        for domain in pool.replicas
    }


def to_plain(config: EndpointConfig) -> dict[str, Any]:
    """Return *config* as dicts, lists, strings and numbers."""
    plain: dict[str, Any] = _ADAPTER.dump_python(config, mode="json")
    return plain


def from_plain(plain: Mapping[str, Any]) -> EndpointConfig:
    """Read back what `to_plain` wrote; raises pydantic's ValidationError on anything else."""
    return _ADAPTER.validate_json(to_json(dict(plain)))


_ADAPTER = TypeAdapter(EndpointConfig)
