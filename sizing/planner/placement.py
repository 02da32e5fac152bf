"""Which GPUs of which node every replica takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.plan import Placement

if TYPE_CHECKING:
    from minicluster.specs.cluster import ClusterSpec


def place(
    groups: list[tuple[str, int, int]], cluster: ClusterSpec, *, first_node: int = 0
) -> dict[str, tuple[Placement, ...]]:
    """
    Pack replicas into HB domains, the widest first, each into the first that has room.

    A replica wider than a domain takes whole domains. Pools may share a node.

    Args:
        groups: role, replicas and GPUs of a replica of each pool.
        cluster: sizes of node and HB domain.
        first_node: number of the first node.

    Returns:
        Per role, one placement a node of each replica, replica after replica.

    """
    domain = cluster.gpus_per_hb_domain
    free: list[list[int]] = []
    placed: dict[str, list[Placement]] = {role: [] for role, _, _ in groups}
    for role, replicas, tp in sorted(groups, key=lambda group: -group[2]):
        at = 0
        for _ in range(replicas):
            if tp > domain:
                taken = _whole(free, tp, domain)
            else:
                at = _first(free, tp, at)
                taken = _taken(free, tp, at, domain)
            placed[role] += _by_node(taken, cluster.gpus_per_node, first_node)
    return {role: tuple(found) for role, found in placed.items()}


def _first(free: list[list[int]], tp: int, at: int) -> int:
    """Return the first domain from *at* on with room for *tp* GPUs; beyond the last: a new one."""
    while at < len(free) and len(free[at]) < tp:
        at += 1
    return at


def _taken(free: list[list[int]], tp: int, at: int, domain: int) -> list[int]:
    """Take *tp* GPUs of a domain."""
    if at == len(free):
        free.append(list(range(at * domain, (at + 1) * domain)))
    taken, free[at] = free[at][:tp], free[at][tp:]
    return taken


def _whole(free: list[list[int]], tp: int, domain: int) -> list[int]:
    """Take new domains for *tp* GPUs; what is left of the last one stays free."""
    start = len(free) * domain
    domains = -(-tp // domain)
    free += [[] for _ in range(domains - 1)]
    free.append(list(range(start + tp, start + domains * domain)))
    return list(range(start, start + tp))


def _by_node(gpus: list[int], per_node: int, first: int) -> list[Placement]:
    """Split numbered GPUs into one placement a node."""
    nodes: dict[int, list[int]] = {}
    for gpu in gpus:
        nodes.setdefault(first + gpu // per_node, []).append(gpu % per_node)
    return [Placement(node=f"node-{node}", gpus=tuple(found)) for node, found in nodes.items()]
