"""`sizing place`: replicas of a plan, or ranks of a training job, onto nodes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from minicluster.errors import InputError
from minicluster.files import write_atomically
from minicluster.shell import say
from minicluster.specs.checks import Options, Whole, one_of
from sizing.cli.common import AsJson, naming, out_file, show, with_keys

if TYPE_CHECKING:
    from minicluster.pages.page import Section
    from minicluster.plan import Plan
    from minicluster.specs.cluster import ClusterSpec
    from minicluster.specs.topology import Inventory, Topology
    from sizing.network.gpu_groups import PoolRequest
    from sizing.network.pools import PoolPlan, PoolRules
    from sizing.network.ranks import RankPlan
    from sizing.network.topology_units import TopologyUnit

FORMATS = ("ray", "slurm", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions(Options):
    """
    What is placed, and constraints by names of tiers; every key is an option.

    Attributes:
        tp: tensor-parallel degree of a training job.
        cp: context-parallel degree of a training job.
        pp: pipeline stages of a training job.
        dp: data-parallel replicas of a training job.
        allow_tp_straddle: TP groups of a training job that may leave the HB domain.
        replica_within: widest tier of one replica.
        pairs_within: widest tier between a prefill and a decode replica.
        spread: smallest number of units of a tier for each role, as TIER:N.
        spare_nodes: number of nodes to keep free.
        spare_tier: tier of which each unit keeps that many nodes free.
    """

    tp: int | None = None
    cp: int = 1
    pp: int = 1
    dp: int = 1
    allow_tp_straddle: bool = False
    replica_within: str | None = None
    pairs_within: str | None = None
    spread: str | None = None
    spare_nodes: Whole = 0
    spare_tier: str | None = None


@with_keys(PlaceOptions)
def place(
    plan: Annotated[
        Path | None, Argument(help="Plan file; or describe a training job by --tp, --pp, --dp")
    ] = None,
    cluster: Annotated[
        str | None, Option(help="Cluster preset or file [default: the plan's]")
    ] = None,
    inventory: Annotated[
        Path | None, Option(help="Inventory (TOML) that lists the cluster's nodes")
    ] = None,
    emit: Annotated[
        str | None, Option(help="Scheduler format to write: " + ", ".join(FORMATS))
    ] = None,
    out: Annotated[
        Path | None, out_file("Plan file to write with this placement; with --emit, its file")
    ] = None,
    as_json: AsJson = False,
    **keys: Any,  # noqa: ANN401  (one option a key of `PlaceOptions`)
) -> None:
    """Place a plan's replicas or a job's ranks; print cost, what crosses each tier, the bound."""
    from minicluster.plan import read_plan, to_json
    from sizing.network.network_cost import crossing
    from sizing.network.pools import PoolPlan
    from sizing.network.ranks import RankPlan
    from sizing.network.topology_units import unit_tree
    from sizing.report.fabric import crossing_lines, cuts_table, gpu_groups_table

    asked = PlaceOptions(**{key: value for key, value in keys.items() if value is not None})
    if (plan is None) == (asked.tp is None):
        both = None if plan is None else f"{plan} with --tp"
        raise InputError("PLAN", both, "a plan, or --tp with --pp and --dp, not both")
    one_of(FORMATS, **{"--emit": emit})
    if out is not None and emit is None:
        _check_written(plan, cluster)
    read = None if plan is None else read_plan(plan)
    spec, topology, nodes = _site(read, cluster, inventory)
    root = unit_tree(
        nodes,
        spare_nodes=asked.spare_nodes,
        spare_tier=asked.spare_tier,
        gpus_per_hb_domain=None if inventory else topology.tiers[0].gpus,
    )
    start = time.perf_counter()
    found = _placed(read, root, topology, asked)
    seconds = time.perf_counter() - start
    for warning in found.warnings:
        say(f"warning: {warning}")
    if emit is not None:
        text = _emitted(emit, found, nodes)
        if out is None:
            sys.stdout.write(text)
        else:
            write_atomically(out, text)
        return
    if out is not None and read is not None and isinstance(found, PoolPlan):
        write_atomically(out, to_json(placed_plan(read, found, nodes if inventory else None)))
        _warn_of_distance(read, found, topology)
    crossed = None if read is None else crossing(_on(read, spec, topology))
    data = {**asdict(found), "search_s": seconds}
    parts: list[Section | str] = [
        cuts_table(found) if isinstance(found, RankPlan) else gpu_groups_table(found)
    ]
    if crossed is not None:
        data["crossing"] = asdict(crossed)
        parts += crossing_lines(crossed)
    show(data, *parts, as_json=as_json)


def _placed(
    plan: Plan | None, root: TopologyUnit, topology: Topology, asked: PlaceOptions
) -> PoolPlan | RankPlan:
    from sizing.network.pools import place_pools
    from sizing.network.ranks import Degrees, RankRules, place_ranks

    names = tuple(tier.name for tier in topology.tiers)
    within = _tier(names, asked.replica_within, "--replica-within")
    if plan is None:
        degrees = Degrees(tp=asked.tp or 0, cp=asked.cp, pp=asked.pp, dp=asked.dp)
        over = tuple(tier.oversubscription for tier in topology.tiers)
        job = RankRules(
            straddle=asked.allow_tp_straddle, replica_within=within, oversubscription=over
        )
        return place_ranks(degrees, root, names, job)
    at, least = _spread(names, asked.spread)
    rules = replace(
        pool_rules(plan, topology),
        replica_within=within,
        pairs_within=_tier(names, asked.pairs_within, "--pairs-within"),
        spread_tier=at,
        spread_least=least,
    )
    return place_pools(requests_of(plan), root, names, rules)


def placed_plan(plan: Plan, found: PoolPlan, nodes: Inventory | None = None) -> Plan:
    """Return *plan* on the nodes where its replicas were placed, *nodes* those of its cluster."""
    kinds = {pool.gpu for pool in plan.pools}
    if len(kinds) > 1:
        raise InputError(
            "PLAN", " and ".join(sorted(kinds)), "pools of one kind of GPU: a node holds one kind"
        )
    pools = tuple(replace(pool, placement=found.placement(pool.role)) for pool in plan.pools)
    if nodes is None:
        return replace(plan, pools=pools)
    cluster = replace(plan.inputs.cluster, nodes=nodes.nodes)
    return replace(plan, pools=pools, inputs=replace(plan.inputs, cluster=cluster))


def _check_written(plan: Path | None, cluster: str | None) -> None:
    """Refuse to write a plan where there is none, or one for another cluster than it was for."""
    if plan is None:
        raise InputError("--out", "without --emit", "a plan to write the placement into")
    if cluster is not None:
        raise InputError(
            "--cluster", cluster, "no such option beside --out: a plan keeps its own cluster",
            f"plan again: `sizing plan SCENARIO --set cluster.preset={cluster}`",
        )  # fmt: skip


def _warn_of_distance(plan: Plan, found: PoolPlan, topology: Topology) -> None:
    """Say where KV caches cross a tier further out than the plan counts on."""
    from sizing.latency.collectives import pools_meet

    names = [tier.name for tier in topology.tiers]
    planned = pools_meet(plan.inputs.cluster, topology)
    used = [names.index(tier) for tier, share in found.meeting_fraction.items() if share]
    if used and max(used) > planned:
        say(
            f"warning: pools meet in {names[max(used)]}, the plan's KV transfers are for"
            f" {names[planned]}: plan again with cluster.pools_meet_in={names[max(used)]}"
        )


def _on(plan: Plan, spec: ClusterSpec, topology: Topology) -> Plan:
    """Return the plan on the cluster that it is placed on, of the same GPU."""
    if spec == plan.inputs.cluster:
        return plan
    spec = replace(spec, gpu=plan.inputs.cluster.gpu, max_gpus=topology.gpus)
    return replace(plan, inputs=replace(plan.inputs, cluster=spec))


def requests_of(plan: Plan) -> list[PoolRequest]:
    """Return the replicas of a plan's pools, prefill before decode."""
    from sizing.network.gpu_groups import PoolRequest

    pools = sorted(plan.pools, key=lambda pool: pool.role, reverse=True)
    return [PoolRequest.of(pool.role, pool.replicas, pool.slicing) for pool in pools]


def pool_rules(plan: Plan, topology: Topology) -> PoolRules:
    """
    Return what the tiers cost a plan's KV transfers.

    A transfer of the mean prompt costs latency and bandwidth of the tier where the two meet, all
    of a unit taken to send at once.
    """
    from minicluster.engine_model.kv_cache import kv_bytes_per_token
    from sizing.network.network_cost import mean_prompt_tokens
    from sizing.network.pools import PoolRules

    load = plan.workload
    prompt = mean_prompt_tokens(load) * kv_bytes_per_token(plan.inputs.model)
    counts = {pool.role: pool.replicas for pool in plan.pools}
    pairs = counts.get("prefill", 0) * counts.get("decode", 0)
    rate = load.requests_per_s * prompt / pairs if pairs else 0.0
    prices = tuple(
        1 / tier.achieved_bytes_per_s() + tier.latency_s / prompt for tier in topology.tiers
    )
    rising = tuple(max(prices[: index + 1]) for index in range(len(prices)))
    return PoolRules(seconds_per_byte=rising, pair_bytes_per_s=rate)


def _site(
    plan: Plan | None, cluster: str | None, inventory: Path | None
) -> tuple[ClusterSpec, Topology, Inventory]:
    """Return the cluster named, or the plan's, with its network and its nodes."""
    from minicluster.config import parse, read_toml
    from minicluster.specs.cluster import topology_of
    from minicluster.specs.topology import Inventory, Node, inventory_of
    from sizing import catalog

    if cluster is not None:
        spec, topology = catalog.find_network(cluster, place="--cluster")
    elif plan is not None:
        spec, topology = plan.inputs.cluster, topology_of(plan.inputs.cluster, plan.inputs.gpu)
    else:
        raise InputError("--cluster", None, "a cluster preset")
    names = tuple(tier.name for tier in topology.tiers)
    if inventory is not None:
        raw = read_toml(inventory).get("nodes", [])
        found = [parse(Node, node, place=f"{inventory}: nodes[{i}]") for i, node in enumerate(raw)]
        with naming(inventory):
            return spec, topology, Inventory(nodes=tuple(found), tiers=names)
    if spec.nodes:
        return spec, topology, Inventory(nodes=spec.nodes, tiers=names)
    return spec, topology, inventory_of(topology)


def _tier(names: tuple[str, ...], name: str | None, place: str) -> int | None:
    one_of(names, **{place: name})
    return None if name is None else names.index(name)


def _spread(names: tuple[str, ...], text: str | None) -> tuple[int | None, int]:
    if text is None:
        return None, 1
    name, _, number = text.partition(":")
    if not number.isdigit() or int(number) < 1:
        raise InputError("--spread", text, "a tier and a number, for example rack:2")
    return _tier(names, name, "--spread"), int(number)


def _emitted(form: str, found: PoolPlan | RankPlan, nodes: Inventory) -> str:
    from sizing.network import scheduler_manifests
    from sizing.network.gpu_groups import GpuGroup
    from sizing.network.pools import PoolPlan
    from sizing.network.ranks import RankPlan

    if form == "slurm":
        return scheduler_manifests.slurm(nodes)
    if form == "ranks":
        if not isinstance(found, RankPlan):
            raise InputError("--emit", form, "a training job: --tp, --pp, --dp")
        return scheduler_manifests.rank_file(found)
    if isinstance(found, PoolPlan):
        groups = found.groups
    else:  # a data-parallel replica is one of ours
        d = found.degrees
        groups = tuple(
            GpuGroup(role="train", replica=n // d.atoms, stage=n % d.atoms,
                     gpus=found.ranks[n * d.tp : (n + 1) * d.tp])
            for n in range(d.atoms * d.dp)
        )  # fmt: skip
    return json.dumps(scheduler_manifests.ray(nodes, groups), indent=2) + "\n"
