"""Cost of leaving the HB domain: KV transfer by tier, TP and groups over several domains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.specs.cluster import topology_of
from minicluster.workload.arrivals import equally_likely
from sizing.latency.collectives import path_coefficients, pools_meet
from sizing.latency.load import decode_load, prefill_load
from sizing.latency.step import Machine, beyond_hb_domain_s, step_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan, Pool
    from minicluster.specs.workload import WorkloadSpec
    from sizing.latency.load import StepLoad

QUANTILES = 100


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
    A pool's step over several HB domains: the plan's own, or that of TP of twice the domain.

    Attributes:
        step_s: of the mean prompt, or of a full decode batch.
        beyond_s: the part of it that one domain as wide as its group (tp x dp) would not take.
        now_s: the same step at the plan's own degree.
    """

    role: str
    tp: int
    step_s: float
    beyond_s: float
    now_s: float


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
            _wide(machine, pool, tokens)
            for pool in plan.pools
            if pool.dp == 1 or pool.tp * pool.dp > domain
        ),
    )


def beyond_by_role(plan: Plan) -> dict[str, float]:
    """Return the seconds a step that each pool pays whose group spans several HB domains."""
    inputs = plan.inputs
    domain = inputs.cluster.gpus_per_hb_domain
    spanning = [pool for pool in plan.pools if pool.tp * pool.dp > domain]
    if inputs.gpu.kind == "cpu" or not spanning:
        return {}
    machine, tokens = Machine.of(inputs), mean_prompt_tokens(plan.workload)
    return {pool.role: _wide(machine, pool, tokens).beyond_s for pool in spanning}


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
    domain = machine.cluster.gpus_per_hb_domain
    load: StepLoad = prefill_load(tokens)
    if pool.role != "prefill":
        load = decode_load(pool.max_num_seqs, tokens)
    tp = pool.tp if pool.tp * pool.dp > domain else 2 * domain
    slicing = replace(pool.slicing, tp=tp)
    return Wide(
        role=pool.role,
        tp=tp,
        step_s=float(step_s(machine, load, slicing=slicing)),
        beyond_s=float(beyond_hb_domain_s(machine, load, slicing=slicing)),
        now_s=float(step_s(machine, load, slicing=pool.slicing)),
    )
