"""Which GPUs of which node every replica takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.plan import Placement

if TYPE_CHECKING:
    from sizing.specs.cluster import ClusterSpec


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
        for _ in range(replicas):
            taken = _whole(free, tp, domain) if tp > domain else _first(free, tp, domain)
            placed[role] += _by_node(taken, cluster.gpus_per_node, first_node)
    return {role: tuple(found) for role, found in placed.items()}


def _first(free: list[list[int]], tp: int, domain: int) -> list[int]:
    """Take *tp* GPUs of the first domain that has them, a new one if none has."""
    for left in free:
        if len(left) >= tp:
            taken, left[:] = left[:tp], left[tp:]
            return taken
    start = len(free) * domain
    free.append(list(range(start + tp, start + domain)))
    return list(range(start, start + tp))


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
