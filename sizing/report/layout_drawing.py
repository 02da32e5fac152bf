"""The layout drawn: nodes, their GPUs, and which pool and replica has each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.report.axes import text
from sizing.report.chart import rectangle, svg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan, Pool

WIDTH = 1060
BOX, GAP, PADDING, HEAD = 26, 4, 10, 20
MOST_NODES = 128
"""More nodes are not drawn: they repeat what is there."""
WIDEST = 16
"""GPUs side by side."""


def layout_drawing(plan: Plan) -> str:
    """Draw every node; a GPU bears the number of its replica."""
    taken = {
        (node, gpu): (pool.role, replica)
        for pool in plan.pools
        for node, gpus, replica in _replicas(pool)
        for gpu in gpus
    }
    kinds = {spot.node: pool.gpu for pool in plan.pools for spot in pool.placement}
    several = len(set(kinds.values())) > 1
    nodes = list(dict.fromkeys(node for node, _ in sorted(taken, key=_order)))
    size = plan.inputs.cluster.gpus_per_node
    columns = min(size, WIDEST)
    rows = -(-size // columns)
    width = columns * (BOX + GAP) - GAP + 2 * PADDING
    height = rows * (BOX + GAP) - GAP + 2 * PADDING + HEAD
    across = max(1, int((WIDTH + 12) // (width + 12)))
    shown = nodes[:MOST_NODES]
    parts = []
    for at, node in enumerate(shown):
        left, top = (at % across) * (width + 12), (at // across) * (height + 12)
        parts.append(rectangle(left, top, (width, height), "node"))
        parts.append(
            text(left + PADDING, top + 16, f"{node}: {kinds[node]}" if several else node, "start")
        )
        for gpu in range(size):
            x = left + PADDING + (gpu % columns) * (BOX + GAP)
            y = top + HEAD + PADDING / 2 + (gpu // columns) * (BOX + GAP)
            parts += _gpu(x, y, node, gpu, taken.get((node, gpu)))
    drawn = -(-len(shown) // across) * (height + 12)
    more = len(nodes) - len(shown)
    if more:
        parts.append(text(0, drawn + 12, f"and {more} more nodes", "start"))
    total = across * (width + 12) - 12 if len(shown) >= across else len(shown) * (width + 12) - 12
    return svg(parts, "layout", max(total, WIDTH), drawn + (24 if more else 0))


def _replicas(pool: Pool) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield node, GPUs and replica of every placement of a pool."""
    each, seen = pool.gpus // pool.replicas, 0
    for placement in pool.placement:
        yield placement.node, placement.gpus, seen // each
        seen += len(placement.gpus)


def _order(place: tuple[str, int]) -> tuple[int, str, int]:
    """Sort node-2 before node-10."""
    node, gpu = place
    digits = node.rpartition("-")[2]
    return (int(digits) if digits.isdecimal() else 0, node, gpu)


def _gpu(x: float, y: float, node: str, gpu: int, taken: tuple[str, int] | None) -> Iterator[str]:
    """Draw one GPU."""
    role, replica = taken or ("free", None)
    said = f"{node}, GPU {gpu}: " + (role if replica is None else f"{role} replica {replica}")
    yield rectangle(x, y, (BOX, BOX), f"gpu {role}", said)
    if replica is not None:
        yield text(x + BOX / 2, y + BOX / 2 + 4, str(replica), style="number")
