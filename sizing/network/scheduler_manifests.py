"""A placement in the words of those who schedule: Ray, Kueue, Volcano, Slurm, a rank file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from minicluster.plan import NODE_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minicluster.specs.topology import Inventory
    from sizing.network.gpu_groups import Gpu, GpuGroup
    from sizing.network.ranks import RankPlan

PREFIX = "minicluster-"
"""Prefix of the Ray labels that say which unit of a tier a node is in."""

LABEL = "minicluster.dev"
"""Prefix of the Kubernetes labels that say which unit of a tier a node is in."""


def ray_labels(inventory: Inventory, nodes: set[str]) -> dict[str, dict[str, str]]:
    """Return the labels to start each node with: `ray start --labels`."""
    return {
        node.name: {NODE_LABEL: node.name, **{f"{PREFIX}{t}": u for t, u in node.units.items()}}
        for node in inventory.nodes
        if node.name in nodes
    }


def ray(inventory: Inventory, groups: Sequence[GpuGroup]) -> dict[str, Any]:
    """
    Labels of nodes, and a placement group for every replica.

    A replica on one node is one bundle, STRICT_PACK; on several one bundle a node, PACK, each
    pinned by `bundle_label_selector` (one entry a bundle, as Ray 2.60 wants it).
    """
    placement_groups = []
    for (role, replica), own in _by_replica(groups).items():
        nodes = _by_node([gpu for group in own for gpu in group.gpus])
        placement_groups.append(
            {
                "role": role,
                "replica": replica,
                "strategy": "STRICT_PACK" if len(nodes) == 1 else "PACK",
                "bundles": [{"GPU": len(gpus)} for gpus in nodes.values()],
                "bundle_label_selector": [{NODE_LABEL: node} for node in nodes],
                "gpus": [{"node": node, "gpus": gpus} for node, gpus in nodes.items()],
            }
        )
    used = {node for group in groups for node, _ in group.gpus}
    return {"node_labels": ray_labels(inventory, used), "placement_groups": placement_groups}


def kueue(inventory: Inventory, groups: Sequence[GpuGroup]) -> dict[str, Any]:
    """
    Topology levels, node labels, and the annotations of each role's pod set (TAS).

    A slice is a replica: it has to stay in the innermost tier that each of them was placed in.
    """
    levels = [f"{LABEL}/{tier}" for tier in reversed(inventory.tiers)]
    pod_sets = {}
    for role, (replicas, pods) in _pods(groups).items():
        within = inventory.tiers[_within(inventory, groups, role)]
        pod_sets[role] = {
            "count": replicas * pods,
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
        "nodeLabels": _kubernetes_labels(inventory, groups),
    }  # fmt: skip


def volcano(inventory: Inventory, groups: Sequence[GpuGroup]) -> dict[str, Any]:
    """
    HyperNodes of every tier that is used, and a pod group with a policy for each role.

    Pods say their role and replica as labels: those of one replica are a subgroup, which has to
    stay in the innermost tier that each of them was placed in.
    """
    pods = _pods(groups)
    policies = [
        {
            "name": role,
            "labelSelector": {"matchLabels": {f"{LABEL}/role": role}},
            "matchLabelKeys": [f"{LABEL}/replica"],
            "subGroupSize": each,
            "minSubGroups": replicas,
            "networkTopology": {
                "mode": "hard",
                "highestTierAllowed": _within(inventory, groups, role) + 1,
            },
        }
        for role, (replicas, each) in pods.items()
    ]
    return {
        "hyperNodes": _hyper_nodes(inventory, groups),
        "podGroup": {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "PodGroup",
            "metadata": {"name": "minicluster"},
            "spec": {
                "minMember": sum(replicas * each for replicas, each in pods.values()),
                "subGroupPolicy": policies,
            },
        },
    }


def _hyper_nodes(inventory: Inventory, groups: Sequence[GpuGroup]) -> list[dict[str, Any]]:
    """Return the units of every tier that hold a node in use, from the inside out."""
    used = {node for group in groups for node, _ in group.gpus}
    members: dict[tuple[int, str], list[str]] = {}
    for node in inventory.nodes:
        if node.name not in used:
            continue
        below = node.name
        for depth, tier in enumerate(inventory.tiers, start=1):
            unit = node.units.get(tier)
            if unit is not None:
                name = unit_name(tier, unit)
                listed = members.setdefault((depth, name), [])
                if below not in listed:
                    listed.append(below)
                below = name
    return [
        {
            "apiVersion": "topology.volcano.sh/v1alpha1",
            "kind": "HyperNode",
            "metadata": {"name": unit},
            "spec": {
                "tier": tier,
                "members": [
                    {"type": "Node" if tier == 1 else "HyperNode",
                     "selector": {"exactMatch": {"name": name}}}
                    for name in names
                ],
            },
        }
        for (tier, unit), names in sorted(members.items())
    ]  # fmt: skip


def unit_name(tier: str, unit: str) -> str:
    """Name a unit apart from those of other tiers, in letters that Kubernetes and Slurm take."""
    name = unit if unit.startswith(tier) else f"{tier}-{unit}"
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def slurm(inventory: Inventory) -> str:
    """Write topology.yaml of Slurm: a tree of switches, one a unit, from the inside out."""
    lines = ["- topology: minicluster", "  cluster_default: true", "  tree:", "    switches:"]
    children: dict[str, dict[tuple[str, str], list[str]]] = {t: {} for t in inventory.tiers}
    for node in inventory.nodes:
        below, kind = node.name, "nodes"
        for tier in inventory.tiers:
            unit = node.units.get(tier)
            if unit is None:
                continue
            name = unit_name(tier, unit)
            listed = children[tier].setdefault((name, kind), [])
            if not listed or listed[-1] != below:
                listed.append(below)
            below, kind = name, "children"
    for tier in inventory.tiers:
        for (unit, kind), names in children[tier].items():
            lines += [f"      - switch: {unit}", f"        {kind}: {ranged(names)}"]
    return "\n".join(lines) + "\n"


def rank_file(ranks: RankPlan) -> str:
    """Write one line a rank: rank, node, GPU of the node, and its place in tp, cp, pp, dp."""
    d = ranks.degrees
    lines = ["rank node gpu tp cp pp dp"]
    for rank, (node, gpu) in enumerate(ranks.ranks):
        tp, rest = rank % d.tp, rank // d.tp
        cp, rest = rest % d.cp, rest // d.cp
        lines.append(f"{rank} {node} {gpu} {tp} {cp} {rest % d.pp} {rest // d.pp}")
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
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        text = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
        plain.append(f"{stem}{text}" if text.isdigit() else f"{stem}[{text}]")
    return ",".join(plain)


def as_text(data: Mapping[str, Any]) -> str:
    """Write JSON, which YAML readers take, too."""
    return json.dumps(data, indent=2) + "\n"


def _pods(groups: Sequence[GpuGroup]) -> dict[str, tuple[int, int]]:
    """Return replicas of each role, and pods of one: a pod takes a replica's GPUs of one node."""
    found: dict[str, tuple[int, int]] = {}
    for (role, _), own in _by_replica(groups).items():
        replicas, pods = found.get(role, (0, 0))
        nodes = len(_by_node([gpu for group in own for gpu in group.gpus]))
        found[role] = (replicas + 1, max(pods, nodes))
    return found


def _within(inventory: Inventory, groups: Sequence[GpuGroup], role: str) -> int:
    """Return the innermost tier of which one unit holds each replica of a role."""
    units = {node.name: node.units for node in inventory.nodes}
    held = [
        {node for group in own for node, _ in group.gpus}
        for (name, _), own in _by_replica(groups).items()
        if name == role
    ]
    last = len(inventory.tiers) - 1
    return next(
        (
            depth
            for depth, tier in enumerate(inventory.tiers)
            if all(len({units[node].get(tier) for node in nodes}) == 1 for nodes in held)
        ),
        last,
    )


def _by_replica(groups: Sequence[GpuGroup]) -> dict[tuple[str, int], list[GpuGroup]]:
    """Gather the groups of each replica."""
    found: dict[tuple[str, int], list[GpuGroup]] = {}
    for group in groups:
        found.setdefault((group.role, group.replica), []).append(group)
    return found


def _by_node(gpus: Sequence[Gpu]) -> dict[str, list[int]]:
    """Group GPUs by node, in order."""
    found: dict[str, list[int]] = {}
    for node, gpu in gpus:
        found.setdefault(node, []).append(gpu)
    return found


def _kubernetes_labels(
    inventory: Inventory, groups: Sequence[GpuGroup]
) -> dict[str, dict[str, str]]:
    """Return the labels of the nodes that are used."""
    used = {node for group in groups for node, _ in group.gpus}
    return {
        node.name: {f"{LABEL}/{tier}": unit for tier, unit in node.units.items()}
        for node in inventory.nodes
        if node.name in used
    }
