"""Cost of leaving the HB domain: KV transfer by tier, TP and groups over several domains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.specs.cluster import topology_of
from minicluster.workload.arrivals import equally_likely
from sizing.latency.collectives import path_coefficients, pools_meet
from sizing.latency.op import StepLoad, decode_load, prefill_load
from sizing.latency.step import step_s, step_terms
from sizing.latency.term import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minicluster.plan import Inputs, Plan, Pool
    from minicluster.specs.slicing import Slicing
    from minicluster.specs.step import PathCoefficients
    from minicluster.specs.workload import WorkloadSpec

QUANTILES = 100

BETWEEN_STAGES = "X4"
"""Equation of the exchange that is no collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """
    KV of the mean prompt, pulled between pools that meet in one tier.

    Attributes:
        seconds: with no other pull under way.
        all_sending_s: with all of a unit's GPUs sending at once, which share its uplinks.
        planned: whether the plan counts on this tier (`cluster.pools_meet_in`).
    """

    tier: str
    oversubscription: float
    seconds: float
    all_sending_s: float
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wide:
    """
    Step of a pool whose groups span several HB domains.

    Attributes:
        step_s: step of the mean prompt, or of a full decode batch.
        beyond_s: part of it that one domain as wide as its group (tp x dp) would not take.
    """

    role: str
    tp: int
    step_s: float
    beyond_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spanning:
    """
    What a step pays in a pool whose groups span several HB domains (docs/model.md, eq. N2, N7).

    Attributes:
        beyond_s: seconds that one domain as wide as a group (tp x dp) would not take.
        pulling_fraction: of the time, while KV pulls hold the NICs of one of its GPUs.
        shared_s: seconds that exchanges take longer, to first order, because they meet pulls.
        pulls_longer_fraction: by which pulls take longer, to first order, because they meet
            exchanges. Neither is in the prediction.
    """

    role: str
    beyond_s: float
    pulling_fraction: float
    shared_s: float
    pulls_longer_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """`transfers` from the inside out, none where pools are not split; `wide` a pool each."""

    transfers: tuple[Transfer, ...]
    wide: tuple[Wide, ...]


def crossing(plan: Plan) -> Crossing:
    """
    Return what crossing costs a plan (docs/model.md, eq. N2, N4, F2).

    That is nothing for a cluster of one HB domain, or of CPUs.

    Raises:
        InputError: the catalog lacks a bandwidth or a latency.

    Ignores:
        Kinds of GPUs other than the cluster's own.
    """
    inputs = plan.inputs
    domain = inputs.cluster.gpus_per_hb_domain
    if inputs.gpu.kind == "cpu" or inputs.cluster.max_gpus <= domain:
        return Crossing(transfers=(), wide=())
    machine = Machine.of(inputs)
    tokens = mean_prompt_tokens(plan.workload)
    roles = {pool.role: pool for pool in plan.pools}
    split = {"prefill", "decode"} <= set(roles)
    return Crossing(
        transfers=tuple(_transfers(machine, roles, tokens)) if split else (),
        wide=tuple(
            _wide(machine, pool, tokens) for pool in plan.pools if pool.tp * pool.dp > domain
        ),
    )


def spanning(inputs: Inputs, pools: Sequence[Pool], path: PathCoefficients) -> tuple[Spanning, ...]:
    """
    Return what each pool pays whose groups span several HB domains.

    With two transfers on one NIC each gets half of it. A pull is under way for a fraction p of the
    time and exchanges for e = t_x / t of a step t, so that to first order exchanges take p t_x
    longer and pulls e times their seconds (docs/model.md, eq. N7).
    """
    load, domain = inputs.scenario.workload, inputs.cluster.gpus_per_hb_domain
    wide = [pool for pool in pools if pool.tp * pool.dp > domain and inputs.gpu.kind != "cpu"]
    found, tokens = [], mean_prompt_tokens(load)
    for pool in wide:
        machine, step = Machine.of(inputs, pool.gpu), _step(pool, tokens)
        exchanges_s, beyond_s = _leaving_s(machine, step, pool.slicing)
        whole_s = float(step_s(machine, step, slicing=pool.slicing))
        pulls_s = load.requests_per_s * tokens * path.transfer_per_token_s if len(pools) > 1 else 0
        pulling = min(1.0, pulls_s / ((pool.replicas - pool.spare_replicas) * pool.dp * pool.pp))
        found.append(
            Spanning(
                role=pool.role,
                beyond_s=beyond_s,
                pulling_fraction=pulling,
                shared_s=pulling * exchanges_s,
                pulls_longer_fraction=exchanges_s / whole_s if pulling else 0.0,
            )
        )
    return tuple(found)


def _leaving_s(machine: Machine, load: StepLoad, slicing: Slicing) -> tuple[float, float]:
    """Return the seconds of a step's collectives that leave the HB domain, and what it adds."""
    joined = replace(machine, cluster=machine.cluster.with_nodes(10**6, 10**6))
    terms = (step_terms(each, load, slicing=slicing) for each in (machine, joined))
    leaving = [
        (far, near)
        for far, near in zip(*terms, strict=True)
        if far.equation != BETWEEN_STAGES
        and float(far.seconds + far.hidden_s) != float(near.seconds + near.hidden_s)
    ]
    exchanges_s = sum(float(far.seconds + far.hidden_s) for far, _ in leaving)
    return exchanges_s, max(0.0, sum(float(far.seconds - near.seconds) for far, near in leaving))


def _step(pool: Pool, tokens: float) -> StepLoad:
    """Return the mean prompt, or a full decode batch."""
    if pool.role == "prefill":
        return prefill_load(tokens)
    return decode_load(pool.max_num_seqs, tokens)


def mean_prompt_tokens(load: WorkloadSpec) -> float:
    """Return the tokens of the prompt whose KV caches are priced."""
    return float(equally_likely(load, QUANTILES).input_tokens.mean())


def _transfers(machine: Machine, roles: dict[str, Pool], tokens: float) -> Iterator[Transfer]:
    """Time the pull of the mean prompt in each tier beyond the HB domain."""
    cluster = machine.cluster
    topology = topology_of(cluster, machine.gpu)
    for index, tier in enumerate(topology.tiers[1:], start=1):
        meeting = replace(cluster, pools_meet_in=tier.name) if cluster.tiers else cluster
        path = path_coefficients(
            replace(machine, cluster=meeting),
            prefill_tp=roles["prefill"].tp,
            decode_tp=roles["decode"].tp,
            tokens=tokens,
        )
        # One pull of each pair at a time: its GPUs' share of the uplinks carries it.
        shared_s = path.uplink_per_token_s / min(each.tp for each in roles.values())
        yield Transfer(
            tier=tier.name,
            oversubscription=tier.oversubscription,
            seconds=path.transfer_base_s + path.transfer_per_token_s * tokens,
            all_sending_s=path.transfer_base_s + max(path.transfer_per_token_s, shared_s) * tokens,
            planned=index == pools_meet(cluster, topology),
        )


def _wide(machine: Machine, pool: Pool, tokens: float) -> Wide:
    load = _step(pool, tokens)
    return Wide(
        role=pool.role,
        tp=pool.tp,
        step_s=float(step_s(machine, load, slicing=pool.slicing)),
        beyond_s=_leaving_s(machine, load, pool.slicing)[1],
    )
