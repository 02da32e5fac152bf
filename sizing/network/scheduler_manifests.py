"""A placement in the words of those who schedule: Ray, Kueue, Volcano, Slurm, a rank file."""

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

LABEL = "minicluster.dev"
"""Prefix of the Kubernetes labels that say which unit of a tier a node is in."""


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


def kueue(inventory: Inventory, groups: Sequence[GpuGroup]) -> dict[str, Any]:
    """
    Topology levels, node labels, and the annotations of each role's pod set (TAS).

    A slice is a replica: it has to stay in the innermost tier that each of them was placed in.
    """
    levels = [f"{LABEL}/{tier}" for tier in reversed(inventory.tiers)]
    replicas = replicas_of(groups)
    pod_sets = {}
    for role, (count, pods) in _pods(replicas).items():
        within = inventory.tiers[_within(inventory, replicas, role)]
        pod_sets[role] = {
            "count": count * pods,
            "annotations": {
                "kueue.x-k8s.io/podset-preferred-topology": levels[0],
                "kueue.x-k8s.io/podset-slice-required-topology": f"{LABEL}/{within}",
                "kueue.x-k8s.io/podset-slice-size": str(pods),
            },
        }
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Topology",
        "metadata": {"name": "minicluster"},
        "spec": {"levels": [*({"nodeLabel": level} for level in levels),
                            {"nodeLabel": "kubernetes.io/hostname"}]},
        "podSets": pod_sets,
        "nodeLabels": {
            node.name: {f"{LABEL}/{tier}": unit for tier, unit in node.units.items()}
            for node in _used(inventory, replicas)
        },
    }  # fmt: skip


def volcano(inventory: Inventory, groups: Sequence[GpuGroup]) -> dict[str, Any]:
    """
    HyperNodes of every tier that is used, and a pod group with a policy for each role.

    Pods say their role and replica as labels: those of one replica are a subgroup, which has to
    stay in the innermost tier that each of them was placed in.
    """
    replicas = replicas_of(groups)
    pods = _pods(replicas)
    policies = [
        {
            "name": role,
            "labelSelector": {"matchLabels": {f"{LABEL}/role": role}},
            "matchLabelKeys": [f"{LABEL}/replica"],
            "subGroupSize": each,
            "minSubGroups": count,
            "networkTopology": {
                "mode": "hard",
                "highestTierAllowed": _within(inventory, replicas, role) + 1,
            },
        }
        for role, (count, each) in pods.items()
    ]
    return {
        "hyperNodes": _hyper_nodes(inventory, replicas),
        "podGroup": {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "PodGroup",
            "metadata": {"name": "minicluster"},
            "spec": {
                "minMember": sum(count * each for count, each in pods.values()),
                "subGroupPolicy": policies,
            },
        },
    }


def _hyper_nodes(inventory: Inventory, replicas: Replicas) -> list[dict[str, Any]]:
    """Return the units of every tier that hold a node in use, from the inside out."""
    return [
        {
            "apiVersion": "topology.volcano.sh/v1alpha1",
            "kind": "HyperNode",
            "metadata": {"name": unit},
            "spec": {
                "tier": depth,
                "members": [
                    {"type": "HyperNode" if of_units else "Node",
                     "selector": {"exactMatch": {"name": name}}}
                    for name in names
                ],
            },
        }
        for (depth, unit, of_units), names in sorted(
            _members(inventory.tiers, _used(inventory, replicas)).items()
        )
    ]  # fmt: skip


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
    """Name a unit apart from those of other tiers, in letters that Kubernetes and Slurm take."""
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


def _pods(replicas: Replicas) -> dict[str, tuple[int, int]]:
    """Return replicas of each role, and pods of one: a pod takes a replica's GPUs of one node."""
    found: dict[str, tuple[int, int]] = {}
    for (role, _), nodes in replicas.items():
        count, pods = found.get(role, (0, 0))
        found[role] = (count + 1, max(pods, len(nodes)))
    return found


def _within(inventory: Inventory, replicas: Replicas, role: str) -> int:
    """Return the innermost tier of which one unit holds each replica of a role."""
    units = {node.name: node.units for node in inventory.nodes}
    held = [nodes for (name, _), nodes in replicas.items() if name == role]
    for depth, tier in enumerate(inventory.tiers):
        if all(len({units[node].get(tier) for node in nodes}) == 1 for nodes in held):
            return depth
    return len(inventory.tiers) - 1


def _used(inventory: Inventory, replicas: Replicas) -> list[Node]:
    used = {node for nodes in replicas.values() for node in nodes}
    return [node for node in inventory.nodes if node.name in used]
