"""Small sites to place replicas and ranks on."""

from __future__ import annotations

from minicluster.specs.topology import Inventory, Node


def site(domains: list[int], per_rack: int = 2) -> Inventory:
    """Return nodes with the given GPUs, an HB domain each, some to a rack."""
    nodes = tuple(
        Node(name=f"n{i}", gpus=gpus, units={"hb": f"h{i}", "rack": f"R_{i // per_rack}"})
        for i, gpus in enumerate(domains)
    )
    return Inventory(nodes=nodes, tiers=("hb", "rack", "pod"))
