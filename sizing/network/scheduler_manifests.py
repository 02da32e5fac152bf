"""A placement in the words of those who schedule: Ray, Slurm, a rank file."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from minicluster.plan import NODE_LABEL
from sizing.network.gpu_groups import GpuGroup, Replicas, replicas_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.topology import Inventory, Node
    from sizing.network.ranks import RankPlan

PREFIX = "minicluster-"
"""Prefix of the Ray labels that say which unit of a tier a node is in."""


def ray(inventory: Inventory, groups: Sequence[GpuGroup]) -> dict[str, Any]:
    """
    Labels of nodes for `ray start --labels`, and a placement group for every replica.

    A replica on one node is one bundle, STRICT_PACK; on several one bundle a node, PACK, each
    pinned by `bundle_label_selector` (one entry a bundle, as Ray 2.60 wants it).
    """
    replicas = replicas_of(groups)
    placement_groups = [
        {
            "role": role,
            "replica": replica,
            "strategy": "STRICT_PACK" if len(nodes) == 1 else "PACK",
            "bundles": [{"GPU": len(gpus)} for gpus in nodes.values()],
            "bundle_label_selector": [{NODE_LABEL: node} for node in nodes],
            "gpus": [{"node": node, "gpus": gpus} for node, gpus in nodes.items()],
        }
        for (role, replica), nodes in replicas.items()
    ]
    labels = {
        node.name: {NODE_LABEL: node.name, **{f"{PREFIX}{t}": u for t, u in node.units.items()}}
        for node in _used(inventory, replicas)
    }
    return {"node_labels": labels, "placement_groups": placement_groups}


def _members(tiers: Sequence[str], nodes: Sequence[Node]) -> dict[tuple[int, str, bool], list[str]]:
    """Return the members of each unit, by its depth and name, and whether they are units."""
    found: dict[tuple[int, str, bool], list[str]] = {}
    for node in nodes:
        below, of_units = node.name, False
        for depth, tier in enumerate(tiers, start=1):
            unit = node.units.get(tier)
            if unit is not None:
                name = unit_name(tier, unit)
                listed = found.setdefault((depth, name, of_units), [])
                if below not in listed:
                    listed.append(below)
                below, of_units = name, True
    return found


def unit_name(tier: str, unit: str) -> str:
    """Name a unit apart from those of other tiers, in letters that Slurm takes."""
    name = unit if unit.startswith(tier) else f"{tier}-{unit}"
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def slurm(inventory: Inventory) -> str:
    """Write topology.yaml of Slurm: a tree of switches, one a unit, from the inside out."""
    lines = ["- topology: minicluster", "  cluster_default: true", "  tree:", "    switches:"]
    members = _members(inventory.tiers, inventory.nodes)
    for (_, unit, of_units), names in sorted(members.items(), key=lambda each: each[0][0]):
        kind = "children" if of_units else "nodes"
        lines += [f"      - switch: {unit}", f"        {kind}: {ranged(names)}"]
    return "\n".join(lines) + "\n"


def rank_file(ranks: RankPlan) -> str:
    """Write one line a rank: rank, node, GPU of the node, and its place in tp, cp, pp, dp."""
    d = ranks.degrees
    places = itertools.product(range(d.dp), range(d.pp), range(d.cp), range(d.tp))
    lines = ["rank node gpu tp cp pp dp"]
    for rank, ((node, gpu), (dp, pp, cp, tp)) in enumerate(zip(ranks.ranks, places, strict=True)):
        lines.append(f"{rank} {node} {gpu} {tp} {cp} {pp} {dp}")
    return "\n".join(lines) + "\n"


def ranged(names: Sequence[str]) -> str:
    """Shorten names that count up, as Slurm does: `node[0-15,20]`."""
    found: dict[str, list[int]] = {}
    plain = []
    for name in dict.fromkeys(names):
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        if digits and (digits == "0" or digits[0] != "0"):
            found.setdefault(stem, []).append(int(digits))
        else:
            plain.append(name)
    for stem, numbers in found.items():
        counted = itertools.groupby(enumerate(sorted(numbers)), key=lambda each: each[1] - each[0])
        runs = [[number for _, number in run] for _, run in counted]
        text = ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
        plain.append(f"{stem}{text}" if text.isdigit() else f"{stem}[{text}]")
    return ",".join(plain)


def _used(inventory: Inventory, replicas: Replicas) -> list[Node]:
    used = {node for nodes in replicas.values() for node in nodes}
    return [node for node in inventory.nodes if node.name in used]
