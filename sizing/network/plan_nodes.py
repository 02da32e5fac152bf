"""Replicas of a plan on its cluster's nodes: on those that it lists, or on as few as hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from minicluster.specs.topology import NETWORK, Inventory, numbered_nodes
from sizing.network.pools import PoolPlan, PoolRules, place_pools
from sizing.network.topology_units import unit_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.plan import Placement
    from minicluster.specs.cluster import ClusterSpec
    from sizing.network.gpu_groups import PoolRequest

STEP = 10.0
"""Price of a byte across a tier, times that of the tier inside it: what is near is nearer first."""


def place(
    cluster: ClusterSpec, requests: Sequence[tuple[str, PoolRequest]]
) -> dict[str, tuple[Placement, ...]]:
    """
    Place the replicas of a plan on the cluster's nodes (docs/model.md, eq. D2).

    Where the cluster lists its nodes, these are taken; else as few as hold the replicas, numbered
    from 0. Nodes hold one kind of GPU.

    Args:
        requests: kind of GPU and replicas of each pool, prefill before decode.

    Returns:
        Per role, one placement a node of each replica, replica after replica.

    Raises:
        NegativeAnswer: the nodes that the cluster lists have no room.
    """
    placed: dict[str, tuple[Placement, ...]] = {}
    for kind in dict.fromkeys(kind for kind, _ in requests):
        own = [request for each, request in requests if each == kind]
        taken = len({place.node for each in placed.values() for place in each})
        found = _placed(cluster, own, taken)
        placed |= {request.role: found.placement(request.role) for request in own}
    return placed


def _placed(cluster: ClusterSpec, requests: Sequence[PoolRequest], first_node: int) -> PoolPlan:
    tiers = cluster.tier_sizes
    if tiers[-1][1] is not None:  # the plan may take more nodes than the preset has room for
        tiers = (*tiers, (NETWORK, None))
    rules = PoolRules(
        seconds_per_byte=tuple(STEP**index for index in range(len(tiers))),
        pair_bytes_per_s=1.0,
    )
    if cluster.nodes:
        listed = Inventory(nodes=cluster.nodes, tiers=tuple(name for name, _ in tiers))
        return place_pools(requests, unit_tree(listed), listed.tiers, rules)
    gpus = sum(request.gpus for request in requests)
    for count in range(-(-gpus // cluster.gpus_per_node), gpus + 1):
        nodes = numbered_nodes(count, cluster.gpus_per_node, tiers, first=first_node)
        root = unit_tree(nodes, gpus_per_hb_domain=cluster.gpus_per_hb_domain)
        try:
            return place_pools(requests, root, nodes.tiers, rules)
        except NegativeAnswer:
            continue  # widths that leave gaps take more nodes
    raise AssertionError("a node for each GPU has room for every group")
